"""Attention with functions for mask and scores (``fxshard::flex_attention``): batch, heads and queries can be sharded; attention within
packed sequences (``fxshard::varlen_attention``): heads.

The functions get places in the whole tensors, so that a shard passes the place of its first batch, head and query. The tensors that they
read stay whole; gradients of those are pending sums if anything is sharded.
"""

from __future__ import annotations

from typing import Any

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import Factors, Name, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.registry import register, replaced

FORWARD, BACKWARD = 3, 7
"""Positions of the first list of tensors in the arguments; offsets come after the second."""


def _tensors(call: Call, query: int) -> tuple[list[Name], list[Name], list[Name]]:
    """Dims of q, k and v, where heads of q are (h g), with h the heads of k and v. If these have a single head, g can be sharded."""
    heads, shared = call.operands[query].shape[1], call.operands[query + 1].shape[1]
    one, grouped = shared == 1, heads != shared
    of_queries: Name = "g" if grouped and one else ("h", "g!") if grouped else "h"
    kv: list[Name] = ["b", "" if grouped and one else "h", "t!"]
    return ["b", of_queries, "s", "d!"], [*kv, "d!"], [*kv, "e!"]


def _whole(call: Call, first: int) -> list[list[Name]]:
    """Dims of the tensors that the functions read: none is sharded."""
    return [[""] * call.operands[entry.index].ndim for entry in (*call.arg(first), *call.arg(first + 1)) if isinstance(entry, Operand)]


def flex_attention(call: Call) -> Factors:
    """(q, k, v, [tensors], [tensors], ...) -> (out, logsumexp, greatest score)."""
    q, k, v = _tensors(call, 0)
    return factors([q, k, v, *_whole(call, FORWARD)], [[*q[:3], "e!"], q[:3], q[:3]])


def flex_attention_backward(call: Call) -> Factors:
    """(grad, grad of logsumexp, q, k, v, out, logsumexp, ...) -> (dq, dk, dv, gradients of tensors): linear in both gradients."""
    given = call.meta(1) is not None
    q, k, v = _tensors(call, 2 if given else 1)
    out: list[Name] = [*q[:3], "e!"]
    read = [out, *([q[:3]] if given else []), q, k, v, out, q[:3], *_whole(call, BACKWARD)]
    others = [[""] * meta.ndim for meta in call.outputs[3:] if meta is not None]
    return factors(read, [q, k, v, *others], linear=linear_groups(call, [(0, 1)]))


def local_flex(ctx: LocalContext) -> Any:
    """The operator at the place of the shard."""
    backward = "backward" in ctx.call.op
    first = BACKWARD if backward else FORWARD
    query = 0 if not backward else 2 if ctx.call.meta(1) is not None else 1
    offsets = [ctx.input_offset(query, dim) if ctx.inputs[query].axes_on(dim) else None for dim in range(3)]
    return ctx.emit(ctx.target, *replaced(ctx.args, {first + 2 + dim: offset for dim, offset in enumerate(offsets)}))


def varlen(call: Call) -> Factors:
    """(q, k, v, bounds, bounds, used keys, ...) -> (out, logsumexp): heads can be sharded, sequences are of any length, and stay whole."""
    q, k = _packed(call, 0)
    rest = [[""] * meta.ndim for meta in call.operands[3:]]
    return factors([q, k, k, *rest], [q, [q[1], "s!"]])


def varlen_backward(call: Call) -> Factors:
    """(grad, q, k, v, out, logsumexp, bounds, bounds, ...) -> (dq, dk, dv): linear in grad."""
    q, k = _packed(call, 1)
    return factors([q, q, k, k, q, [q[1], "s!"], [""], [""]], [q, k, k], linear=linear_groups(call, [(0,)]))


def _packed(call: Call, query: int) -> tuple[list[Name], list[Name]]:
    """Dims of q and out [s, h, d], and of k and v [t, h or h/g, d]."""
    heads, shared = call.operands[query].shape[1], call.operands[query + 1].shape[1]
    one, grouped = shared == 1, heads != shared
    return ["s!", "g" if grouped and one else ("h", "g!") if grouped else "h", "d!"], ["t!", "" if grouped and one else "h", "d!"]


register("fxshard.flex_attention.default", flex_attention, local=local_flex)
register("fxshard.flex_attention_backward.default", flex_attention_backward, local=local_flex)
register("fxshard.varlen_attention.default", varlen)
register("fxshard.varlen_attention_backward.default", varlen_backward)
