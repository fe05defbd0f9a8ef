"""Normalisation: statistics reduce some dims, which stay whole; weight gradients are sums over all other dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxshard.graph.call import Call, Operand
from fxshard.layout.layouts import REDUCE_OPS
from fxshard.strategies.engine.factors import EXTREMA, SUMS, Factors, Linear, Name, Rule, factors, is_one, linear_groups
from fxshard.strategies.engine.local import LocalContext, on_contiguous
from fxshard.strategies.engine.notation import rule
from fxshard.strategies.engine.registry import register, replaced, unchanged
from fxshard.strategies.tensors.dims import named


def layer_norm(backward: bool) -> Rule:
    """Layer norm: x is normalised over its last dims, whose shape is the argument after x; tensors with only these dims are weights.

    The output is affine in weight and bias. Gradients are linear in the incoming gradient, and dx also in the weight.
    """
    like = 1 if backward else 0

    def rule(call: Call) -> Factors:
        x = call.operands[like]
        normal = len(call.arg(like + 1))
        dims = named(x.ndim, range(x.ndim - normal, x.ndim))

        def of(meta: Any) -> list[str]:
            if meta.ndim < x.ndim:
                return dims[x.ndim - meta.ndim :]
            return ["" if is_one(size) else n for size, n in zip(meta.shape, dims, strict=True)]

        outs = [None if o is None else of(o) for o in call.outputs]
        linear, depends = _affine_backward(call) if backward else _affine(call, 2, 3)
        return factors([of(o) for o in call.operands], outs, linear=linear, depends=depends)

    return rule


def _affine(call: Call, weight: int, bias: int) -> tuple[tuple[Linear, ...], tuple[tuple[int, ...], ...]]:
    """(linear groups, depends) of (out, statistics...); ``weight``, ``bias``: argument positions. Statistics depend on x only."""
    every = tuple(range(len(call.operands)))
    ops = SUMS if isinstance(call.arg(weight), Operand) else ("avg",)
    given = [position for position in (weight, bias) if isinstance(call.arg(position), Operand)]
    alone = linear_groups(call, [(bias,)], EXTREMA, real=True) if bias in given else ()
    return (*linear_groups(call, [given], ops), *alone), (every, *((0,) for _ in call.outputs[1:]))


def _affine_backward(call: Call) -> tuple[tuple[Linear, ...], tuple[tuple[int, ...], ...]]:
    """(linear groups, depends) of (grad, x, shape, statistics, weight, bias) -> (dx, dweight, dbias); no output reads the bias."""
    has_bias = len(call.outputs) > 2
    position = 5 if has_bias else 4
    weight = _operand(call.arg(position))
    bias = _operand(call.arg(position + 1)) if has_bias else ()
    statistics = tuple(i for i in range(len(call.operands)) if i not in (*weight, *bias))
    groups = (*linear_groups(call, [(0,)]), *linear_groups(call, [(position,)]))
    unread = linear_groups(call, [(position + 1,)], REDUCE_OPS, unread=True) if has_bias else ()
    return (*groups, *unread), ((*statistics, *weight), statistics, (0,))[: len(call.outputs)]


def _operand(value: Any) -> tuple[int, ...]:
    return (value.index,) if isinstance(value, Operand) else ()


def batch_norm(batch_free: bool, *groups: tuple[int, ...]) -> Rule:
    """Batch norm: x is n c s..., vectors have one element per channel. In training the statistics need all of n and s.

    Outside training the forward returns the statistics that it was given, which do not depend on x.
    """

    def rule(call: Call) -> Factors:
        ndim = max(o.ndim for o in call.operands)
        free = batch_free or not _training(call)
        dims = ["n" if free else "n!", "c", *(f"s{i}" if free else f"s{i}!" for i in range(ndim - 2))]

        def of(meta: Any) -> list[str]:
            return dims if meta.ndim > 1 else ["" if meta.shape[0] == 0 else "c"]

        outs = [None if o is None else of(o) for o in call.outputs]
        every = tuple(range(len(call.operands)))
        depends = None if groups else (every, *(every[1:] for _ in outs[1:]))
        return factors([of(o) for o in call.operands], outs, linear=linear_groups(call, groups), depends=depends)

    return rule


def _training(call: Call) -> bool:
    position = {"aten.native_batch_norm_backward.default": 7, "aten._native_batch_norm_legit.no_stats": 3}.get(call.op, 5)
    return bool(call.arg(position))


def group_norm(call: Call) -> Factors:
    """x is n (g c) s..., normalised over c and s; statistics are n g, weights (g c)."""
    forward = call.op == "aten.native_group_norm.default"
    batch, channel, groups = (call.arg(p) for p in ((3, 4, 6) if forward else (5, 6, 8)))
    merged: Name = ("g", "c!")
    stats: list[Name] = ["n", "g"]

    def of(meta: Any, statistic: bool) -> list[Name]:
        return stats if statistic else [merged] if meta.ndim == 1 else ["n", merged, *(f"s{i}!" for i in range(meta.ndim - 2))]

    ins = [of(o, not forward and i in (2, 3)) for i, o in enumerate(call.operands)]
    outs = [None if o is None else of(o, forward and i > 0) for i, o in enumerate(call.outputs)]
    sizes = {"n": batch, "g": groups, "c": channel // groups}
    weight = _operand(call.arg(4))
    others = tuple(i for i in range(len(call.operands)) if i not in weight)
    backward = (*linear_groups(call, [(0,)]), *linear_groups(call, [(4,)])), ((*others, *weight), others, (0,))
    linear, depends = _affine(call, 1, 2) if forward else backward
    return factors(ins, outs, sizes=sizes, linear=linear, depends=depends)


def local_group_norm(ctx: LocalContext) -> Any:
    """Replaces N, C and the number of groups by those of the shard."""
    first, source = (3, 0) if ctx.call.op == "aten.native_group_norm.default" else (5, 1)
    batch, channel = ctx.input_shape(source)[:2]
    groups = ctx.call.arg(first + 3) * channel // ctx.call.arg(first + 1)
    return ctx.emit(ctx.target, *replaced(ctx.args, {first: batch, first + 1: channel, first + 3: groups}), **ctx.kwargs)


def renorm(call: Call) -> Factors:
    """Scales slices along one dim to a norm of at most ``maxnorm``."""
    ndim = call.operands[0].ndim
    dims = named(ndim, (d for d in range(ndim) if d != call.arg(2) % ndim))
    return factors([dims], [dims])


def local_spread(ctx: LocalContext) -> Any:
    """The spread over all dims but the channels."""
    return spread_over(ctx, [d for d in range(ctx.call.operands[0].ndim) if d != 1])


def spread_over(ctx: LocalContext, dims: Sequence[int], **options: Any) -> Any:
    """The operator, or if the dims are whole, torch's variance times the count: it reads x once, fused with the sum."""
    if any(ctx.inputs[0].axes_on(d) for d in dims) or ctx.call.operands[0].dtype.itemsize < 4:
        return unchanged(ctx)
    variance = ctx.emit(torch.ops.aten.var.correction, ctx.args[0], dims, correction=0, **options)
    return ctx.emit(torch.ops.aten.mul.Tensor, variance, ctx.args[2])


# Decomposed batch norm in training: a sharded batch leaves the sums for the statistics pending.
register("fxshard.channel_sum.default", rule("n c ... -> c", linear=[(0,)]))
register("fxshard.channel_spread.default", rule("n c ..., c -> c"), local=local_spread)
register("fxshard.batch_statistics.default", rule("c, c -> c, c"))
register("fxshard.running_statistics.default", rule("c, c, c, c -> c, c"))
register("fxshard.normalise.default", rule("n c ..., c, c, c, c -> n c ...", at=range(5)))
register("fxshard.batch_norm_sums.default", rule("n c ..., n c ..., c, c -> two! c", linear=[(0,)]))
_BACKWARD = rule("n c ..., n c ..., c, c, c, two! c -> n c ...", at=range(6), linear=[(0, 5)])
register("fxshard.batch_norm_backward.default", _BACKWARD)

register("aten.native_layer_norm.default", layer_norm(False))
register("aten.native_layer_norm_backward.default", layer_norm(True), local=on_contiguous(unchanged))
register("aten._fused_rms_norm.default", layer_norm(False))
register("aten._fused_rms_norm_backward.default", layer_norm(True), local=on_contiguous(unchanged))
register(["aten.native_group_norm.default", "aten.native_group_norm_backward.default"], group_norm, local=on_contiguous(local_group_norm))
register(["aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm.default"], batch_norm(False))
register(["aten._native_batch_norm_legit.default", "aten._native_batch_norm_legit.no_stats"], batch_norm(False))
register("aten.renorm.default", renorm)
register("aten._native_batch_norm_legit_no_training.default", batch_norm(True))
register("aten.native_batch_norm_backward.default", batch_norm(False, (0,)))
