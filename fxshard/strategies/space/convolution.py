"""Convolution: out[n, (g o), s'] = sum_{i, k} x[n, (g i), s' + k] w[(g o), i, k] + b[(g o)].

Batch n, groups g, and without groups the channels o and i can be sharded; i leaves a pending sum. Spatial dims can be sharded if
windows tile them (patches, 1 x 1), or if one window spans them, which leaves a pending sum. A transposed
convolution exchanges image and result: out[n, (g o), s' + k] = sum_i x[n, (g i), s'] w[(g i), o, k].
"""

from __future__ import annotations

from typing import Any

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import EXTREMA, Factors, Name, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.registry import register, replaced
from fxshard.strategies.tensors.windows import OVERLAP, is_single_window, is_tiling, per_dim, space_names

Tensor = list[Name]


def _tensors(call: Call, x: Any, weight: Any, out: Any, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor, str]:
    """Dims of x, weight, bias and output, and why spatial dims stay whole; ``first``: position of the argument ``stride``."""
    count, transposed = x.ndim - 2, call.arg(first + 3)
    stride, padding, dilation = (per_dim(call.arg(first + i), count) for i in range(3))
    big, small = (out, x) if transposed else (x, out)
    found, fits = [], []
    for d in range(count):
        sizes = big.shape[d + 2], small.shape[d + 2], weight.shape[d + 2]
        tiles = is_tiling(*sizes, stride[d], padding[d], dilation[d])
        fits.append((tiles, is_single_window(*sizes, padding[d], dilation[d])))
        found.append(space_names(d, *fits[d]))
    wide, window, narrow = ([names[i] for names in found] for i in range(3))
    note = "" if all(map(any, fits)) else OVERLAP
    i, o = ("g", "i"), ("g", "o")
    if transposed:
        return ["n", i, *narrow], [i, "o", *window], [o], ["n", o, *wide], note
    return ["n", i, *wide], [o, "i", *window], [o], ["n", o, *narrow], note


def convolution(call: Call) -> Factors:
    """(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    x, weight, bias, out, note = _tensors(call, call.operands[0], call.operands[1], call.outputs[0], 3)
    operands = [x, weight, bias][: len(call.operands)]
    groups = (*linear_groups(call, [(0, 2), (1, 2)]), *linear_groups(call, [(2,)], EXTREMA, real=True))
    return factors(operands, [out], sizes={"g": call.arg(8)}, linear=groups, additive=tuple(range(2, len(operands))), note=note)


def backward(call: Call) -> Factors:
    """(grad, x, weight, ...) -> (dx, dweight, dbias); dbias depends on grad only."""
    grad, image, kernel = call.operands
    x, weight, bias, out, note = _tensors(call, image, kernel, grad, 4)
    outputs = [None if o is None else dims for o, dims in zip(call.outputs, (x, weight, bias), strict=True)]
    return factors(
        [out, x, weight],
        outputs,
        sizes={"g": call.arg(9)},
        linear=linear_groups(call, [(0,), (1,), (2,)]),
        depends=((0, 2), (0, 1), (0,)),
        note=note,
    )


def _local_groups(ctx: LocalContext, groups: Any, operand: int) -> Any:
    """The number of groups of the shard; a single group stays one if its channels are sharded."""
    return groups if groups == 1 else groups * ctx.input_shape(operand)[1] // ctx.call.operands[operand].shape[1]


def local_convolution(ctx: LocalContext) -> Any:
    return ctx.emit(ctx.target, *replaced(ctx.args, {8: _local_groups(ctx, ctx.call.arg(8), 0)}), **ctx.kwargs)


def local_backward(ctx: LocalContext) -> Any:
    """Replaces the number of groups and the size of the bias by those of the shard."""
    values: dict[int, Any] = {9: _local_groups(ctx, ctx.call.arg(9), 1)}
    if ctx.call.arg(3) is not None:
        values[3] = [ctx.input_shape(0)[1]]
    return ctx.emit(ctx.target, *replaced(ctx.args, values), **ctx.kwargs)


register("aten.convolution.default", convolution, local=local_convolution)
register("aten.convolution_backward.default", backward, local=local_backward)
