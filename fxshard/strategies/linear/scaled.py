"""Scaled matmuls of 8-bit floats: out[m, n] = a_scale[m] b_scale[n] sum_k a[m, k] b[k, n] + bias[n].

Supports per-tensor scales, and scales per row of a and column of b. Block scales have a kernel-specific memory order: these calls
are replicated. Kernels require k and n in multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import Factors, Name, factors, known_equal, replicate_all
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.registry import register, replaced

aten = torch.ops.aten
BLOCK = 16
"""Kernels require k and n to be multiples of this number of elements."""
OF_BLOCKS = "the memory order of block scales depends on the kernel"
PER_TENSOR, PER_ROW = 0, 1
"""Scaling recipes, numbered as in torch.nn.functional.ScalingType."""


def by_shapes(call: Call) -> Factors:
    """(a, b, a_scale, b_scale, bias, scale of the result): the shapes of the scales determine their kind."""
    (m, _), (_, n) = call.operands[0].shape, call.operands[1].shape
    a, b = (call.operands[call.arg(i).index].shape for i in (2, 3))
    if all(known_equal(size, 1) for size in (*a, *b)):
        return _product(call, False, [len(a)], [len(b)])
    rows = len(a) == len(b) == 2 and all(map(known_equal, (*a, *b), (m, 1, 1, n)))
    return _product(call, True) if rows else replicate_all(call, OF_BLOCKS)


def by_recipes(call: Call) -> Factors:
    """(a, b, a_scales, recipes, swizzles, b_scales, recipes, swizzles, bias, ...): the recipes give the kind of the scales."""
    recipes = (tuple(call.arg(3)), tuple(call.arg(6)))
    if call.arg(10, "contraction_dim") or recipes not in (((PER_TENSOR,),) * 2, ((PER_ROW,),) * 2):
        return replicate_all(call, OF_BLOCKS)
    a, b = (call.operands[call.arg(i)[0].index].ndim for i in (2, 5))
    return _product(call, recipes[0] == (PER_ROW,), [a], [b])


def _product(call: Call, rows: bool, a: Sequence[int] = (2,), b: Sequence[int] = (2,)) -> Factors:
    """Factors for both operators' operand order: matrices, scales, bias; further operands are scalars. ``rows``: scales per row and
    column; ``a``, ``b``: ndims of per-tensor scales."""
    k, n = (_blocks(name, size) for name, size in (("k", call.operands[0].shape[1]), ("n", call.operands[1].shape[1])))
    scales: list[list[Name]] = [["m", ""], ["", n]] if rows else [[""] * a[0], [""] * b[0]]
    operands: list[list[Name]] = [["m", k], [k, n], *scales]
    bias = call.arg(4 if call.op.startswith("aten._scaled_mm.") else 8, "bias")
    operands += [[n] if isinstance(bias, Operand) and i == bias.index else [""] * o.ndim for i, o in enumerate(call.operands) if i > 3]
    additive = (bias.index,) if isinstance(bias, Operand) else ()
    return factors(operands, [["m", n]], sizes={"k_block": BLOCK, "n_block": BLOCK}, additive=additive)


def _blocks(name: str, size: Any) -> Name:
    return (name, f"{name}_block!") if known_equal(size % BLOCK, 0) else f"{name}!"


def local_scaled_mm(ctx: LocalContext) -> Any:
    """Gives the kernels a in row-major, b in column-major order, and contiguous scales."""
    a, b = ctx.args[:2]
    turned = (
        b
        if _has_memory(b, lambda t: t.stride(0) == 1 and t.stride(1) >= t.shape[0])
        else _transposed(ctx, _contiguous(ctx, _transposed(ctx, b)))
    )
    rest = tuple([_contiguous(ctx, x) for x in v] if isinstance(v, (tuple, list)) else _contiguous(ctx, v) for v in ctx.args[2:])
    return ctx.emit(ctx.target, *replaced((a, b, *rest), {0: _contiguous(ctx, a), 1: turned}), **ctx.kwargs)


def _transposed(ctx: LocalContext, x: Any) -> Any:
    return ctx.emit(aten.transpose.int, x, 0, 1)


def _contiguous(ctx: LocalContext, x: Any) -> Any:
    if not isinstance(x, (torch.Tensor, fx.Node)) or _has_memory(x, torch.Tensor.is_contiguous):
        return x
    return ctx.emit(aten.clone.default, x, memory_format=torch.contiguous_format)


def _has_memory(x: Any, check: Callable[[torch.Tensor], bool]) -> bool:
    return check(x.meta["val"] if isinstance(x, fx.Node) else x)


register("aten._scaled_mm.default", by_shapes, local=local_scaled_mm)
register("aten._scaled_mm_v2.default", by_recipes, local=local_scaled_mm)
