"""Decompositions applied while tracing, into forms for which every sharding is exact (a mean is a sum, then one division).

An operator without a rule is decomposed by torch's core table, because its parts may have rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.dtensor.rules import sharding_functions
from fxshard._torch_compat.inductor.decompositions import core_decompositions
from fxshard.ops.norms.softmax import accumulation_dtype
from fxshard.passes.trace.functions.norms import NORMS
from fxshard.strategies import has_rule

aten = torch.ops.aten
MEAN, SUM = 1, 2


def planning_decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator overload -> decomposition, given the rules that are registered now.

    Random operators are not decomposed by torch's table.
    """
    with_function = sharding_functions()
    without_rule = {
        op: decomposition
        for op, decomposition in core_decompositions().items()
        if torch.Tag.nondeterministic_seeded not in op.tags and not has_rule(str(op)) and str(op) not in with_function
    }
    return without_rule | {
        aten.mean.default: _mean,
        aten.mean.dim: _mean_dim,
        aten.nll_loss_forward.default: _nll_loss_forward,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten._softmax.default: lambda x, dim, to_float: _softmax(x, dim, "exp", torch.float32 if to_float else x.dtype),
        aten._log_softmax.default: lambda x, dim, to_float: _softmax(x, dim, "log", torch.float32 if to_float else x.dtype),
        aten._safe_softmax.default: lambda x, dim, dtype=None: _softmax(x if dtype is None else x.to(dtype), dim, "safe", dtype or x.dtype),
        aten._softmax_backward_data.default: _softmax_backward,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
        aten.new_zeros.default: _like(aten.zeros.default),
        aten.new_ones.default: _like(aten.ones.default),
        aten.new_full.default: _like(aten.full.default),
        aten.new_empty.default: _like(aten.empty.memory_format),
        **NORMS,
    }


def _like(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """x.new_zeros(size) is zeros(size) of x's dtype and device: it does not read x, which may then have any layout."""

    def decomposition(x: torch.Tensor, *values: Any, **options: Any) -> torch.Tensor:
        given = {name: option for name, option in options.items() if option is not None}
        return create(*values, **{"dtype": x.dtype, "device": x.device} | given)

    return decomposition


def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return aten.sum.default(x, dtype=dtype) / x.numel()


def _mean_dim(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    dims = list(dim) if dim else list(range(x.dim()))
    return aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims if x.dim())


def _nll_loss_forward(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int) -> Any:
    """mean = sum of the weighted losses / sum of the weights; both sums are over the batch."""
    if reduction != MEAN:
        return NotImplemented
    total, weights = aten.nll_loss_forward.default(x, target, weight, SUM, ignore_index)
    return total / weights, weights


def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> Any:
    if reduction != MEAN:
        return NotImplemented
    return aten.nll_loss_backward.default(grad / total_weight, x, target, weight, SUM, ignore_index, total_weight)


def _softmax(x: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> Any:
    """0-dim tensors and empty rows are left to torch."""
    if not x.dim() or not x.shape[dim]:
        return NotImplemented
    dim %= x.dim()
    m = aten.amax.default(x, [dim])
    return torch.ops.fxshard.softmax(x, m, torch.ops.fxshard.sum_exp(x, m, dim), dim, kind, dtype)


def _softmax_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> Any:
    if not y.dim():
        return NotImplemented
    dim %= y.dim()
    return torch.ops.fxshard.softmax_backward(grad, y, torch.ops.fxshard.sum_product(grad, y, dim), dim, "exp", dtype)


def _log_softmax_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype) -> Any:
    if not y.dim():
        return NotImplemented
    dim %= y.dim()
    total = aten.sum.dim_IntList(grad, [dim], dtype=accumulation_dtype(grad.dtype))
    return torch.ops.fxshard.softmax_backward(grad, y, total, dim, "log", dtype)
