"""Embedding: out[..., h] = weight[index[...], h]; with sharded rows, a rank reads its own rows and gives zeros for others."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext, on_contiguous
from fxshard.strategies.engine.registry import register, unchanged
from fxshard.strategies.tensors.dims import named

aten = torch.ops.aten


def embedding(call: Call) -> Factors:
    """v h, b... -> b... h: sharded rows v leave a pending sum."""
    index = named(call.operands[1].ndim, prefix="b")
    return factors([["v", "h"], index], [[*index, "h"]], linear=linear_groups(call, [(0,)], MOVEMENT))


def local_embedding(ctx: LocalContext) -> Any:
    """For indices of other ranks' rows, reads row 0 and zeroes the result."""
    if not ctx.inputs[0].axes_on(0):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    weight, index = ctx.args[:2]
    rows = ctx.input_shape(0)[0]
    place = ctx.emit(aten.sub.Tensor, index, ctx.input_offset(0, 0))
    outside = _outside(ctx, place, rows)
    found = ctx.emit(aten.embedding.default, weight, ctx.emit(aten.masked_fill.Scalar, place, outside, 0))
    return ctx.emit(aten.masked_fill.Scalar, found, ctx.emit(aten.unsqueeze.default, outside, -1), 0)


def _outside(ctx: LocalContext, place: Any, rows: Any) -> Any:
    below = ctx.emit(aten.lt.Scalar, place, 0)
    return ctx.emit(aten.logical_or.default, below, ctx.emit(aten.ge.Scalar, place, rows))


def embedding_backward(call: Call) -> Factors:
    """b... h, b... -> v h, summed over b; with scaling by frequency, b stays whole."""
    index = named(call.operands[1].ndim, prefix="b")
    reduce: dict[str, str | None] = dict.fromkeys(index, None) if call.arg(4) else {}
    return factors([[*index, "h"], index], [["v", "h"]], reduce=reduce, linear=linear_groups(call, [(0,)]))


def local_embedding_backward(ctx: LocalContext) -> Any:
    """Gradients of other ranks' rows and of the padding row go to an extra row, which is dropped."""
    if not ctx.outputs[0].axes_on(0):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    grad, index, _, padding, by_frequency = ctx.args
    rows = ctx.output_shape()[0]
    place = ctx.emit(aten.sub.Tensor, index, ctx.output_offset(0, 0))
    dropped = ctx.emit(aten.logical_or.default, _outside(ctx, place, rows), ctx.emit(aten.eq.Scalar, index, padding))
    place = ctx.emit(aten.masked_fill.Scalar, place, dropped, rows)
    return ctx.emit(aten.slice.Tensor, ctx.emit(ctx.target, grad, place, rows + 1, -1, by_frequency), 0, 0, rows)


def bag(call: Call) -> Factors:
    """v h, i, bag -> bag h, and positions of indices, bags and maxima. Bags have any length, so only h can be sharded."""
    index = [[f"p{i}!"] for i in range(len(call.operands) - 1)]
    places = (tuple(range(1, len(call.operands))),) * 2
    most = call.outputs[3]
    assert most is not None
    maxima = (["m!", "h"], (0, *places[0])) if most.ndim == 2 else (["m!"], places[0])
    outs = [["bag!", "h"], ["o!"], ["s!"], maxima[0]]
    return factors([["v!", "h"], *index], outs, depends=((0, *places[0]), *places, maxima[1]))


def bag_backward(call: Call) -> Factors:
    """bag h and the positions -> v h; linear in the gradient."""
    places = [["m!", "h"] if o.ndim == 2 else [f"p{i}!"] for i, o in enumerate(call.operands[1:])]
    return factors([["bag!", "h"], *places], [["v!", "h"]], linear=linear_groups(call, [(0,)]))


def bag_weights_backward(call: Call) -> Factors:
    """(grad [bag h], weight [v h], positions) -> i: a sum over h."""
    places = [[f"p{i}!"] for i in range(len(call.operands) - 2)]
    return factors([["bag!", "h"], ["v!", "h"], *places], [["i!"]], linear=linear_groups(call, [(0,), (1,)]))


register(["aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"], bag, local=on_contiguous(unchanged))
register("aten._embedding_bag_dense_backward.default", bag_backward, local=on_contiguous(unchanged))
register("aten._embedding_bag_per_sample_weights_backward.default", bag_weights_backward, local=on_contiguous(unchanged))
register("aten.embedding.default", embedding, local=local_embedding)
register("aten.embedding_dense_backward.default", embedding_backward, local=local_embedding_backward)
