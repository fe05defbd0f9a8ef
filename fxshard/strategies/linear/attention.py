"""Attention: out[b, h, s] = softmax_t(q[b, h, s] k[b, h, t] + mask) v[b, h, t]; b, h and s can be sharded, t stays whole.

Causal means t <= s in global indices, so each shard of the queries gets its own mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, Name, factors, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext, emit_padding
from fxshard.strategies.engine.registry import register, replaced

aten = torch.ops.aten


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
    return factors([q, k, k, *mask], [q, lse])


def sdpa_backward(call: Call) -> Factors:
    """(grad, q, k, v, out, logsumexp, mask, ...) -> (dq, dk, dv): linear in grad; sharded s or g leaves dk and dv pending sums."""
    q, k, lse, mask = _tensors(call, 1, 6)
    return factors([q, q, k, k, q, lse, *mask], [q, k, k], linear=linear_groups(call, [(0,)]))


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
    """Attention of a shard; with sharded queries, ``is_causal`` becomes a mask [1, 1, s, t].

    Kernels divide by the number of queries: a shard that may be empty is padded with one query, whose result is dropped.
    """
    if not ctx.inputs[query].axes_on(2):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    rows = ctx.input_shape(query)[2]
    some = rows if surely(rows > 0) else torch.sym_max(rows, 1)
    args = list(ctx.args)
    if some is not rows:
        shapes = [v.meta["val"].shape if isinstance(v, fx.Node) else () for v in args]
        cut = [i for i in range(mask + 1) if len(shapes[i]) > 2 and i not in (query + 1, query + 2)]
        for i in cut:
            dim = 2 if i < mask else len(shapes[i]) - 2
            if i < mask or known_equal(shapes[i][dim], rows):
                args[i] = emit_padding(ctx.emit, args[i], [0, 0] * (len(shapes[i]) - 1 - dim) + [0, some - rows], 0)
    if ctx.call.arg(mask + 1):
        args = list(replaced(tuple(args), {mask: _causal(ctx, query, some), mask + 1: False}))
    results = ctx.emit(ctx.target, *args, **ctx.kwargs)
    return results if some is rows else _first_rows(ctx, results, rows, query)


def _causal(ctx: LocalContext, query: int, rows: int) -> fx.Node:
    columns = ctx.input_shape(query + 1)[2]
    here = ctx.emit(aten.arange.default, rows, dtype=torch.int64)
    row = ctx.emit(aten.add.Tensor, here, ctx.input_offset(query, 2))
    kept = ctx.emit(
        aten.ge.Tensor,
        ctx.emit(aten.unsqueeze.default, row, 1),
        ctx.emit(aten.arange.default, columns, dtype=torch.int64),
    )
    return ctx.emit(aten.view.default, kept, [1, 1, rows, columns])


def _first_rows(ctx: LocalContext, results: fx.Node, rows: int, query: int) -> tuple[fx.Node, ...]:
    """The results, cut to ``rows`` queries if they have a dim of queries: both results of the forward, dq of the backward."""
    parts = [ctx.item(results, i) for i in range(len(results.meta["val"]))]
    here = ctx.emit(aten.arange.default, rows, dtype=torch.int64)
    count = 1 if query else 2
    return (*(ctx.emit(aten.index_select.default, part, 2, here) for part in parts[:count]), *parts[count:])


register("fxshard.sdpa.default", sdpa, local=local_sdpa)
register("fxshard.sdpa_backward.default", sdpa_backward, local=local_backward)
register("aten._scaled_dot_product_flash_attention_for_cpu.default", cpu_kernel)
register("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", cpu_kernel_backward)
