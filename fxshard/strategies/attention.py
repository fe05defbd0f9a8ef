"""Attention: out[b, h, s] = softmax_t(q[b, h, s] k[b, h, t] + mask) v[b, h, t]; all of t is needed, s only when not causal."""

from __future__ import annotations

from fxshard.call import Call
from fxshard.strategies.factors import Factors, Name, factors, linear_groups
from fxshard.strategies.registry import register


def _tensors(call: Call, mask: int, causal: bool) -> tuple[list[Name], list[Name], list[Name], list[list[Name]]]:
    """Dims of q (out), of k (v), of logsumexp, and of the mask if there is one (from argument ``mask``)."""
    grouped = call.arg(mask + 3)
    heads: Name = ("h", "g!") if grouped else "h"
    s = "s!" if causal else "s"
    full: list[Name] = ["b", heads, s, "t!"]
    meta = call.meta(mask)
    return ["b", heads, s, "d!"], ["b", "h", "t!", "d!"], ["b", heads, s], [] if meta is None else [full[4 - meta.ndim :]]


def sdpa(call: Call) -> Factors:
    """(q, k, v, mask, is_causal, scale, enable_gqa) -> (out, logsumexp)."""
    q, k, lse, mask = _tensors(call, 3, call.arg(4))
    return factors([q, k, k, *mask], [q, lse])


def sdpa_backward(call: Call) -> Factors:
    """(grad, q, k, v, out, logsumexp, mask, ...) -> (dq, dk, dv): linear in grad; s leaves sums in dk, dv."""
    q, k, lse, mask = _tensors(call, 6, call.arg(7))
    return factors([q, q, k, k, q, lse, *mask], [q, k, k], linear=linear_groups(call, [(0,)]))


register("fxshard.sdpa.default", sdpa)
register("fxshard.sdpa_backward.default", sdpa_backward)
