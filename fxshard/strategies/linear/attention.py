"""Attention: out[b, h, s] = softmax_t(q[b, h, s] k[b, h, t] + mask) v[b, h, t]; b, h and s can be sharded; t too, on
the axis that shards s (``ring_attention``).

Causal means t <= s in global indices. A shard of the queries knows the position of its first one, and skips the keys that it does not see.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, Name, factors, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext, emit_padding
from fxshard.strategies.engine.registry import register
from fxshard.strategies.linear.ring_attention import collectives, ring_axis, ring_backward, ring_forward

aten = torch.ops.aten
RING = (("s", "t"),)
"""Queries and keys sharded on one axis: the local form passes keys around."""


def _tensors(call: Call, query: int, mask: int) -> tuple[list[Name], list[Name], list[Name], list[list[Name]]]:
    """Dims of q and out, of k and v, of logsumexp, and of the mask if there is one. ``query``, ``mask``: argument positions.

    The heads of q are (h g), with h the heads of k and v. If k and v have a single head, g can be sharded.
    """
    grouped, one = call.arg(mask + 3), call.operands[query + 1].shape[1] == 1
    heads: Name = "g" if grouped and one else ("h", "g!") if grouped else "h"
    full: list[Name] = ["b", heads, "s", "t!"]
    meta = call.meta(mask)
    kv: list[Name] = ["b", "" if grouped and one else "h", "t!", "d!"]
    return ["b", heads, "s", "d!"], kv, ["b", heads, "s"], [] if meta is None else [full[4 - meta.ndim :]]


def sdpa(call: Call) -> Factors:
    """(q, k, v, mask, is_causal, scale, enable_gqa) -> (out, logsumexp)."""
    q, k, lse, mask = _tensors(call, 0, 3)
    return factors([q, k, k, *mask], [q, lse], together=() if mask else RING)


def sdpa_backward(call: Call) -> Factors:
    """(grad, q, k, v, out, logsumexp, mask, ...) -> (dq, dk, dv): linear in grad; sharded s or g leaves dk and dv pending sums."""
    q, k, lse, mask = _tensors(call, 1, 6)
    properties = {"linear": linear_groups(call, [(0,)]), "together": () if mask else RING}
    return factors([q, q, k, k, q, lse, *mask], [q, k, k], **properties)


def cpu_kernel(call: Call) -> Factors:
    """torch's own operator, as DTensor sees it: (q, k, v, ..., [mask]) -> (out, logsumexp); the queries stay whole."""
    q, k, lse, mask = _of_kernel(call, 0)
    return factors([q, k, k, *mask], [q, lse])


def cpu_kernel_backward(call: Call) -> Factors:
    """(grad, q, k, v, out, logsumexp, ..., [mask]) -> (dq, dk, dv)."""
    q, k, lse, mask = _of_kernel(call, 1)
    return factors([q, q, k, k, q, lse, *mask], [q, k, k], linear=linear_groups(call, [(0,)]))


def _of_kernel(call: Call, query: int) -> tuple[list[Name], list[Name], list[Name], list[list[Name]]]:
    """As ``_tensors``; the mask is the last operand, if there is one. Heads that share keys stay whole."""
    same = call.operands[query].shape[1] == call.operands[query + 1].shape[1]
    heads, given = ("h", "h") if same else ("h!", "k!"), call.operands[(6 if query else 3) :]
    full: list[Name] = ["b", heads[0], "s!", "t!"]
    return ["b", heads[0], "s!", "d!"], ["b", heads[1], "t!", "d!"], ["b", heads[0], "s!"], [full[4 - one.ndim :] for one in given]


def local_sdpa(ctx: LocalContext) -> Any:
    return _shard(ctx, 0, 3)


def local_backward(ctx: LocalContext) -> Any:
    return _shard(ctx, 1, 6)


def _shard(ctx: LocalContext, query: int, mask: int) -> Any:
    """Attention of a shard; with sharded queries, ``is_causal`` becomes an offset, with sharded keys they are passed around a ring."""
    axis = ring_axis(ctx, query)
    if axis is not None:
        return ring_backward(ctx, axis) if query else ring_forward(ctx, axis)
    if not ctx.inputs[query].axes_on(2):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    if ctx.call.arg(mask + 1):
        scale, grouped = ctx.args[mask + 2 :]
        target = torch.ops.fxshard.block_attention_backward if query else torch.ops.fxshard.block_attention
        return ctx.emit(target.default, *ctx.args[:mask], ctx.input_offset(query, 2), None, None, scale, grouped)
    return _padded(ctx, query, mask)


def _padded(ctx: LocalContext, query: int, mask: int) -> Any:
    """Kernels divide by the number of queries: a shard that may be empty is padded with one query, whose result is dropped."""
    rows = ctx.input_shape(query)[2]
    if surely(rows > 0):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    some, args = torch.sym_max(rows, 1), list(ctx.args)
    shapes = [v.meta["val"].shape if isinstance(v, fx.Node) else () for v in args]
    cut = [i for i in range(mask + 1) if len(shapes[i]) > 2 and i not in (query + 1, query + 2)]
    for i in cut:
        dim = 2 if i < mask else len(shapes[i]) - 2
        if i < mask or known_equal(shapes[i][dim], rows):
            args[i] = emit_padding(ctx.emit, args[i], [0, 0] * (len(shapes[i]) - 1 - dim) + [0, some - rows], 0)
    return _first_rows(ctx, ctx.emit(ctx.target, *args, **ctx.kwargs), rows, query)


def _first_rows(ctx: LocalContext, results: fx.Node, rows: int, query: int) -> tuple[fx.Node, ...]:
    """The results, cut to ``rows`` queries if they have a dim of queries: both results of the forward, dq of the backward."""
    parts = [ctx.item(results, i) for i in range(len(results.meta["val"]))]
    here = ctx.emit(aten.arange.default, rows, dtype=torch.int64)
    count = 1 if query else 2
    return (*(ctx.emit(aten.index_select.default, part, 2, here) for part in parts[:count]), *parts[count:])


register("fxshard.sdpa.default", sdpa, local=local_sdpa, collectives=partial(collectives, query=0))
register("fxshard.sdpa_backward.default", sdpa_backward, local=local_backward, collectives=partial(collectives, query=1))
register("aten._scaled_dot_product_flash_attention_for_cpu.default", cpu_kernel)
register("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", cpu_kernel_backward)
