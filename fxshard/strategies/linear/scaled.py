"""Matmuls of eight-bit floats with scales: out[m, n] = a_scale[m] b_scale[n] sum_k a[m, k] b[k, n] + bias[n].

Scales of whole matrices, and of rows of a and columns of b, are supported; scales of blocks, whose order in memory is the
kernel's own, stay whole, and so do the matrices. Kernels want k and n in multiples of 16.
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
"""Elements: kernels take k and n in multiples of it."""
OF_BLOCKS = "scales of blocks lie in memory as their kernel wants them"
PER_TENSOR, PER_ROW = 0, 1
"""Recipes, as torch.nn.functional.ScalingType numbers them."""


def by_shapes(call: Call) -> Factors:
    """(a, b, a_scale, b_scale, bias, scale of the result): the shapes of the scales say what they are of."""
    (m, _), (_, n) = call.operands[0].shape, call.operands[1].shape
    a, b = (call.operands[call.arg(i).index].shape for i in (2, 3))
    if all(known_equal(size, 1) for size in (*a, *b)):
        return _product(call, False, [len(a)], [len(b)])
    rows = len(a) == len(b) == 2 and all(map(known_equal, (*a, *b), (m, 1, 1, n)))
    return _product(call, True) if rows else replicate_all(call, OF_BLOCKS)


def by_recipes(call: Call) -> Factors:
    """(a, b, a_scales, recipes, swizzles, b_scales, recipes, swizzles, bias, ...): the recipes say what the scales are of."""
    recipes = (tuple(call.arg(3)), tuple(call.arg(6)))
    if call.arg(10, "contraction_dim") or recipes not in (((PER_TENSOR,),) * 2, ((PER_ROW,),) * 2):
        return replicate_all(call, OF_BLOCKS)
    a, b = (call.operands[call.arg(i)[0].index].ndim for i in (2, 5))
    return _product(call, recipes[0] == (PER_ROW,), [a], [b])


def _product(call: Call, rows: bool, a: Sequence[int] = (2,), b: Sequence[int] = (2,)) -> Factors:
    """Operands in the order of both operators: the matrices, the scales, the bias, what is left being scalars."""
    k, n = (_blocks(name, size) for name, size in (("k", call.operands[0].shape[1]), ("n", call.operands[1].shape[1])))
    scales: list[list[Name]] = [["m", ""], ["", n]] if rows else [[""] * a[0], [""] * b[0]]
    operands: list[list[Name]] = [["m", k], [k, n], *scales]
    bias = call.arg(4 if call.op.startswith("aten._scaled_mm.") else 8, "bias")
    operands += [[n] if isinstance(bias, Operand) and i == bias.index else [""] * o.ndim for i, o in enumerate(call.operands) if i > 3]
    additive = (bias.index,) if isinstance(bias, Operand) else ()
    return factors(operands, [["m", n]], sizes={"k_block": BLOCK, "n_block": BLOCK}, additive=additive)


def _blocks(name: str, size: Any) -> Name:
    return (name, f"{name}_block!") if known_equal(size % BLOCK, 0) else f"{name}!"


def by_memory(ctx: LocalContext) -> Any:
    """The rows of a and the columns of b side by side in memory, as the kernels want them; the scales without gaps."""
    a, b = ctx.args[:2]
    turned = b if _is(b, lambda t: t.stride(0) == 1 and t.stride(1) >= t.shape[0]) else _turned(ctx, _dense(ctx, _turned(ctx, b)))
    rest = tuple([_dense(ctx, x) for x in v] if isinstance(v, (tuple, list)) else _dense(ctx, v) for v in ctx.args[2:])
    return ctx.emit(ctx.target, *replaced((a, b, *rest), {0: _dense(ctx, a), 1: turned}), **ctx.kwargs)


def _turned(ctx: LocalContext, x: Any) -> Any:
    return ctx.emit(aten.transpose.int, x, 0, 1)


def _dense(ctx: LocalContext, x: Any) -> Any:
    if not isinstance(x, (torch.Tensor, fx.Node)) or _is(x, torch.Tensor.is_contiguous):
        return x
    return ctx.emit(aten.clone.default, x, memory_format=torch.contiguous_format)


def _is(x: Any, lies: Callable[[torch.Tensor], bool]) -> bool:
    return lies(x.meta["val"] if isinstance(x, fx.Node) else x)


register("aten._scaled_mm.default", by_shapes, local=by_memory)
register("aten._scaled_mm_v2.default", by_recipes, local=by_memory)
