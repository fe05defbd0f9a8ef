"""Convolution: out[n, (g o), s'] = sum_{i, k} x[n, (g i), s' + k] w[(g o), i, k] + b[(g o)].

Batch n, groups g, and without groups the channels o and i are free; i leaves a pending sum. Space stays whole.
A transposed convolution shards its batch only.
"""

from __future__ import annotations

from typing import Any

from fxshard.call import Call
from fxshard.strategies.factors import Factors, Name, factors, linear_groups
from fxshard.strategies.local import LocalContext
from fxshard.strategies.registry import register, replaced


def _tensors(ndim: int, transposed: bool) -> tuple[list[Name], list[Name], list[Name], list[Name]]:
    """Dims of x, weight, bias and output."""
    x_space, w_space, y_space = ([f"{letter}{d}!" for d in range(ndim - 2)] for letter in "swy")
    if transposed:
        return ["n", "i!", *x_space], ["i!", "o!", *w_space], ["bias!"], ["n", "out!", *y_space]
    channels: Name = ("g", "o")
    return ["n", ("g", "i"), *x_space], [channels, "i", *w_space], [channels], ["n", channels, *y_space]


def convolution(call: Call) -> Factors:
    """(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    x, weight, bias, out = _tensors(call.operands[0].ndim, call.arg(6))
    operands = [x, weight, bias][: len(call.operands)]
    groups = linear_groups(call, [(0, 2), (1, 2)])
    return factors(operands, [out], sizes={"g": call.arg(8)}, linear=groups, additive=tuple(range(2, len(operands))))


def backward(call: Call) -> Factors:
    """(grad, x, weight, ...) -> (dx, dweight, dbias); dbias is computed from grad alone."""
    x, weight, bias, out = _tensors(call.operands[0].ndim, call.arg(7))
    outputs = [None if o is None else dims for o, dims in zip(call.outputs, (x, weight, bias), strict=True)]
    return factors(
        [out, x, weight],
        outputs,
        sizes={"g": call.arg(9)},
        linear=linear_groups(call, [(0,)]),
        depends=((0, 2), (0, 1), (0,)),
    )


def _local_groups(ctx: LocalContext, groups: Any, operand: int) -> Any:
    """The groups of the shard; a single group stays one when its channels are sharded."""
    return groups if groups == 1 else groups * ctx.input_shape(operand)[1] // ctx.call.operands[operand].shape[1]


def local_convolution(ctx: LocalContext) -> Any:
    return ctx.emit(ctx.target, *replaced(ctx.args, {8: _local_groups(ctx, ctx.call.arg(8), 0)}), **ctx.kwargs)


def local_backward(ctx: LocalContext) -> Any:
    """Groups and the size of the bias are those of the shard."""
    values: dict[int, Any] = {9: _local_groups(ctx, ctx.call.arg(9), 1)}
    if ctx.call.arg(3) is not None:
        values[3] = [ctx.input_shape(0)[1]]
    return ctx.emit(ctx.target, *replaced(ctx.args, values), **ctx.kwargs)


register("aten.convolution.default", convolution, local=local_convolution)
register("aten.convolution_backward.default", backward, local=local_backward)
