"""``fxshard::expert_linear`` and ``expert_outer``: products in which each row has the matrix of its expert.

Rows come in any order, and are sorted by expert for the kernel: torch's grouped product for bfloat16, else one product for each expert.
A row whose id is not that of an expert has no matrix: its result is zero, and it adds nothing to the gradients of matrices. So a rank with
some of the experts subtracts the number of its first one from all ids, and computes the rows of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fxshard.ops.kernels import operator

ALIGNMENT = 16
"""Alignment of rows, in bytes, that torch's grouped product requires."""


def _grouped_shape(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _outer_shape(rows: torch.Tensor, grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grads.shape[1])


@torch.library.custom_op("fxshard::one_by_one", mutates_args=())
def one_by_one(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows ends[e - 1] to ends[e] times weight[e], for rows [s, m], weight [e, m, n] and ends [e]; zeros after the last. Reads ``ends``."""
    found = rows.new_zeros(rows.shape[0], weight.shape[2])
    for expert, (start, end) in enumerate(_ranges(ends)):
        torch.mm(rows[start:end], weight[expert], out=found[start:end])
    return found


@torch.library.custom_op("fxshard::outer_one_by_one", mutates_args=())
def outer_one_by_one(rows: torch.Tensor, grads: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The products of rows^T [s, m] and grads [s, n] over rows ends[e - 1] to ends[e], for each e: [e, m, n]. Reads ``ends``."""
    found = rows.new_zeros(len(ends), rows.shape[1], grads.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends)):
        torch.mm(rows[start:end].t(), grads[start:end], out=found[expert])
    return found


one_by_one.register_fake(_grouped_shape)
outer_one_by_one.register_fake(_outer_shape)


@operator(lambda x, weight, ids: x.new_empty([*x.shape[:-1], weight.shape[2]]))
def expert_linear(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """out[t, j] = x[t, j] weight[ids[t, j]], for x [t, k, m], weight [e, m, n] and ids [t, k] of integers: [t, k, n]."""
    order, ends = _sorted_by_expert(ids, weight.shape[0])
    rows = x.reshape(-1, x.shape[-1])[order]
    if _has_kernel(rows, weight):
        found = F.grouped_mm(rows, _aligned(weight), offs=ends.to(torch.int32))
        found = found.masked_fill((torch.arange(rows.shape[0], device=rows.device) >= ends[-1])[:, None], 0)
    else:
        found = torch.ops.fxshard.one_by_one(rows, weight, ends)
    return torch.zeros_like(found).index_copy(0, order, found).view(*x.shape[:-1], weight.shape[2])


@operator(lambda x, grad, ids, experts: x.new_empty([experts, x.shape[-1], grad.shape[-1]]))
def expert_outer(x: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """out[e] = the sum of x[t, j]^T grad[t, j] over the rows with ids[t, j] = e, for x [t, k, m], grad [t, k, n]: [experts, m, n]."""
    order, ends = _sorted_by_expert(ids, experts)
    rows, grads = (a.reshape(-1, a.shape[-1])[order] for a in (x, grad))
    if _has_kernel(rows, grads):
        return F.grouped_mm(rows.t(), grads, offs=ends.to(torch.int32))
    return torch.ops.fxshard.outer_one_by_one(rows, grads, ends)


def _sorted_by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order of the rows, those without an expert last; where each expert's end in it)."""
    flat = ids.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), counts[:experts].cumsum(0)


def _ranges(ends: torch.Tensor) -> list[tuple[int, int]]:
    last = ends.tolist()
    return list(zip([0, *last], last, strict=False))


def _has_kernel(*operands: torch.Tensor) -> bool:
    """Whether torch's grouped product takes the operands; without rows there is nothing to compute."""
    even = all(a.shape[-1] * a.element_size() % ALIGNMENT == 0 for a in operands)
    return even and all(a.dtype == torch.bfloat16 and a.numel() > 0 for a in operands)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, or a copy, with its matrices row-major or column-major and aligned."""
    rows, columns = weight.stride()[-2:]
    steps = (weight.stride(0), rows if columns == 1 else columns)
    good = 1 in (rows, columns) and all(s * weight.element_size() % ALIGNMENT == 0 for s in steps)
    return weight if good else weight.contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, weight, ids = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    dx = torch.ops.fxshard.expert_linear(grad, weight.transpose(1, 2), ids) if needs_x else None
    return dx, torch.ops.fxshard.expert_outer(x, grad, ids, weight.shape[0]) if needs_weight else None, None


torch.library.register_autograd("fxshard::expert_linear", _backward, setup_context=_setup)
