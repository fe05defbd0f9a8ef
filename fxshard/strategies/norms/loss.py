"""Losses: a sharded batch leaves a pending sum; a mean is a sum divided by the global count.

Cross-entropy is traced in decomposed form (``ops.norms.cross_entropy``), where batch and classes can be sharded. In torch's own
loss = -sum_n weight[t_n] x[n, t_n] the classes stay whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext, LocalForm, on_contiguous
from fxshard.strategies.engine.notation import pointwise_rule, rule
from fxshard.strategies.engine.registry import register, replaced, unchanged
from fxshard.strategies.norms.softmax import decomposed

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def _dims(call: Call, x: int, reduction: int) -> tuple[list[str], list[str]]:
    """Dims of x and of the target; a mean needs the whole batch, to know its divisor."""
    mark = "!" if reduction == MEAN else ""
    rest = [f"s{i}{mark}" for i in range(call.operands[x].ndim - 2)]
    batch = [f"n{mark}"] if call.operands[x].ndim > 1 else []
    return [*batch, "c!", *rest], [*batch, *rest]


def forward(call: Call) -> Factors:
    """x [n c s...], target [n s...], weight [c] -> loss, total weight: both sums over the batch."""
    reduction = call.arg(3)
    x, target = _dims(call, 0, reduction)
    operands = [x, target, ["c!"]][: len(call.operands)]
    return factors(operands, [target if reduction == NONE else [], []])


def backward(call: Call) -> Factors:
    """Linear in the gradient; the total weight is a scalar."""
    reduction = call.arg(4)
    x, target = _dims(call, 1, reduction)
    grad = target if reduction == NONE else []
    weight = [["c!"]] if call.meta(3) is not None else []
    return factors([grad, x, target, *weight, []], [x], linear=linear_groups(call, [(0,)]))


register(["aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"], forward)
register(["aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"], backward, local=on_contiguous(unchanged))


def with_first_class(x: int, dim: int) -> LocalForm:
    """Appends the index of the shard's first class as an argument. ``x``, ``dim``: positions of the sharded argument and of the dim."""

    def local(ctx: LocalContext) -> Any:
        operand, at = ctx.call.arg(x).index, ctx.call.arg(dim)
        first = [ctx.input_offset(operand, at)] if ctx.inputs[operand].axes_on(at) else []
        return ctx.emit(ctx.target, *ctx.args, *first)

    return local


def local_spread(ctx: LocalContext) -> Any:
    """The classes of the output's shard only."""
    values, target, dim, _, dtype = ctx.args
    first = [ctx.output_offset(0, dim)] if ctx.outputs[0].axes_on(dim) else []
    return ctx.emit(ctx.target, values, target, dim, ctx.output_shape()[dim], dtype, *first)


register("fxshard.target_score.default", decomposed(3, "x s s -> s"), local=with_first_class(0, 3))
register("fxshard.score_sum.default", decomposed(3, "x s c -> s"))
register("fxshard.cross_entropy.default", rule("..., ..., w!, ..., ... -> ..., ...", at=(0, 1, 2, 3, 4)))
register("fxshard.cross_entropy_backward.default", decomposed(8, "s s s x s s s c -> x", (0,)), local=with_first_class(3, 8))
register("fxshard.spread_target.default", decomposed(2, "s s -> x", (0,)), local=local_spread)


def local_loss(reduction: int, is_backward: bool) -> LocalForm:
    """Computes a mean as the sum over the global count; its gradient likewise."""

    def local(ctx: LocalContext) -> Any:
        if ctx.call.arg(reduction, default=MEAN) != MEAN:
            return unchanged(ctx)
        padded = ctx.args if len(ctx.args) > reduction else (*ctx.args, *[None] * (reduction - len(ctx.args)), MEAN)
        args = replaced(padded, {reduction: SUM})
        count = math.prod(ctx.call.operands[is_backward].shape)
        if is_backward:
            return ctx.emit(ctx.target, ctx.emit(aten.div.Tensor, args[0], count), *args[1:], **ctx.kwargs)
        return ctx.emit(aten.div.Tensor, ctx.emit(ctx.target, *args, **ctx.kwargs), count)

    return local


# Elementwise losses, perhaps reduced.
for _op, _at in {"mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3}.items():
    register(f"aten.{_op}.default", pointwise_rule(), local=local_loss(_at, False))
    register(f"aten.{_op}_backward.default", pointwise_rule((0,)), local=local_loss(_at + 1, True))
register("aten.binary_cross_entropy_with_logits.default", pointwise_rule(), local=local_loss(4, False))
