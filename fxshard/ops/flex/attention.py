"""``fxshard::flex_attention`` and its backward: softmax(mask(score_mod(scale q k^T))) v, by blocks of queries, in torch's own products.

The mask and the change of scores are texts of functions of a score's place in the whole tensors (``fxshard.ops.flex.functions``). A shard
knows the place of its first batch, head and query, so that any function gives the same for it. For each block of queries, only keys
between the first and the last that one of them sees are computed, and no more scores than those are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxshard.ops.flex.functions import everywhere, function_of, is_identity, place_of
from fxshard.ops.kernels import ALLOCATIONS
from fxshard.ops.sdpa.attention import lse_dtype

ROWS, SCORES = 128, 2**25
"""Queries, and about how many scores, that are in memory at once."""


class Mods(NamedTuple):
    """What changes scores: the texts of the score and of the mask function, the tensors that each reads, the place of the first score."""

    score: str
    mask: str
    score_tensors: Sequence[Tensor]
    mask_tensors: Sequence[Tensor]
    offsets: tuple[Tensor | None, ...]

    def changed(self, scores: Tensor, place: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """The scores [b, h, s, t] after the score function."""
        return scores if is_identity(self.score) else everywhere(function_of(self.score), 1, len(tensors))(scores, *place, *tensors)


class Block(NamedTuple):
    """Scores of some queries and keys that are computed together: ranges, place, which of the scores are seen [b or 1, h or 1, s, t]."""

    rows: slice
    keys: slice
    place: tuple[Tensor, ...]
    seen: Tensor


def _blocks(q: Tensor, k: Tensor, mods: Mods) -> Iterator[Block]:
    """Blocks of queries, with the keys between the first and last that are seen; none for queries that see no key."""
    if not q.numel() or not k.numel():
        return
    batch, head, row, key = place_of((*q.shape[:3], k.shape[2]), (*mods.offsets, None), q.device)
    sees = everywhere(function_of(mods.mask), 0, len(mods.mask_tensors))
    size = _rows(q, k)
    for start in range(0, q.shape[2], size):
        rows = slice(start, start + size)
        seen = _narrow(sees(batch, head, row[rows], key, *mods.mask_tensors))
        used = seen.flatten(0, 2).any(0).nonzero()
        if len(used):
            keys = slice(int(used[0]), int(used[-1]) + 1)
            yield Block(rows, keys, (batch, head, row[rows], key[keys]), seen[..., keys])


def _rows(q: Tensor, k: Tensor) -> int:
    """Queries in a block: at most ROWS, fewer if their scores are many more than SCORES."""
    return max(8, min(ROWS, SCORES // (q.shape[0] * q.shape[1] * k.shape[2])))


def _narrow(seen: Tensor) -> Tensor:
    """``seen`` [b, h, s, t] without the copies for batches and heads on which it does not depend."""
    for dim in (0, 1):
        seen = seen.narrow(dim, 0, 1) if seen.stride(dim) == 0 else seen
    return seen


def _by_key_head(x: Tensor, heads: int) -> Tensor:
    """[b, h, s, d] with the queries of heads that share a head of keys side by side: [b, heads, h / heads * s, d]."""
    return x.unflatten(1, (heads, -1)).flatten(2, 3)


def _raw(block: Block, q: Tensor, k: Tensor, scale: float) -> Tensor:
    dtype = lse_dtype(q)
    some = q[:, :, block.rows].to(dtype)
    products = _by_key_head(some, k.shape[1]) @ k[:, :, block.keys].to(dtype).transpose(-2, -1)
    return products.reshape(*some.shape[:3], -1) * scale


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """weights [b, h, s, t] times v [b, h or h/g, t, d] -> [b, h, s, d]."""
    return (_by_key_head(weights, v.shape[1]) @ v).reshape(*weights.shape[:3], v.shape[-1])


@torch.library.custom_op("fxshard::flex_attention", mutates_args=())
def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    batch: Tensor | None,
    head: Tensor | None,
    row: Tensor | None,
    score_mod: str,
    mask_mod: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of q [b, h, s, d] over k, v [b, h or h/g, t, d or e] -> (out [b, h, s, e], logsumexp, greatest score [b, h, s]).

    ``batch``, ``head``, ``row``: int64 scalars or None: the place of the first batch, head and query in the whole tensors. A query that
    sees no key has out 0, logsumexp and greatest score -inf.
    """
    mods = Mods(score_mod, mask_mod, score_tensors, mask_tensors, (batch, head, row))
    out, lse, most = empty_results(q, v)
    out, lse, most = out.zero_(), lse.fill_(-math.inf), most.fill_(-math.inf)
    for block in _blocks(q, k, mods):
        scores = mods.changed(_raw(block, q, k, scale), block.place, score_tensors).masked_fill(~block.seen, -math.inf)
        lse[:, :, block.rows] = total = scores.logsumexp(-1)
        most[:, :, block.rows] = scores.amax(-1)
        weights = (scores - total.masked_fill(total == -math.inf, 0.0).unsqueeze(-1)).exp()
        out[:, :, block.rows] = _weighted(weights.to(q.dtype), v[:, :, block.keys].to(q.dtype))
    return out, lse, most


@torch.library.custom_op("fxshard::flex_attention_backward", mutates_args=())
def flex_attention_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    batch: Tensor | None,
    head: Tensor | None,
    row: Tensor | None,
    score_mod: str,
    mask_mod: str,
    scale: float,
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients of q, k and v, and of the score function's tensors whose numbers are ``wanted``."""
    mods = Mods(score_mod, mask_mod, score_tensors, mask_tensors, (batch, head, row))
    dtype, heads = lse.dtype, k.shape[1]
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
    others = [torch.zeros_like(score_tensors[i], memory_format=torch.contiguous_format) for i in wanted]
    for block in _blocks(q, k, mods):
        some, keys, values = q[:, :, block.rows].to(dtype), k[:, :, block.keys].to(dtype), v[:, :, block.keys].to(dtype)
        of_out = grad[:, :, block.rows].to(dtype)
        inner = (of_out * out[:, :, block.rows].to(dtype)).sum(-1)
        inner = inner if grad_lse is None else inner - grad_lse[:, :, block.rows].to(dtype)
        raw = _raw(block, q, k, scale)
        scores = mods.changed(raw, block.place, score_tensors)
        weights = _weights(scores, lse[:, :, block.rows], block.seen)
        of_scores = weights * (_weighted(of_out, values.transpose(-2, -1)) - inner.unsqueeze(-1))
        of_raw, *of_tensors = _through(mods, raw, block.place, of_scores, wanted)
        of_raw = of_raw.masked_fill(~block.seen, 0.0) * scale
        dq[:, :, block.rows] = _weighted(of_raw, keys)
        dk[:, :, block.keys] += _by_key_head(of_raw, heads).transpose(-2, -1) @ _by_key_head(some, heads)
        dv[:, :, block.keys] += _by_key_head(weights, heads).transpose(-2, -1) @ _by_key_head(of_out, heads)
        others = [total + share for total, share in zip(others, of_tensors, strict=True)]
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *others]


def _weights(scores: Tensor, lse: Tensor, seen: Tensor) -> Tensor:
    known = lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)
    return (scores - known).exp().masked_fill(~seen, 0.0)


def _through(mods: Mods, raw: Tensor, place: Sequence[Tensor], grad: Tensor, wanted: Sequence[int]) -> tuple[Tensor, ...]:
    """The gradients of the scores before the score function, and of its ``wanted`` tensors."""
    if is_identity(mods.score):
        return (grad, *(torch.zeros_like(mods.score_tensors[i]) for i in wanted))

    def changed(scores: Tensor, *some: Tensor) -> Tensor:
        given = dict(zip(wanted, some, strict=True))
        return mods.changed(scores, place, [given.get(i, t) for i, t in enumerate(mods.score_tensors)])

    _, pulled = torch.func.vjp(changed, raw, *(mods.score_tensors[i] for i in wanted))
    found: tuple[Tensor, ...] = pulled(grad)
    return found


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    statistic = q.new_empty(q.shape[:-1], dtype=lse_dtype(q))
    return q.new_empty([*q.shape[:-1], v.shape[-1]]), statistic, torch.empty_like(statistic)


def fake_gradients(grad: Tensor, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> list[Tensor]:
    tensors, wanted = rest[0], rest[-1]
    return [t.new_empty(t.shape) for t in (q, k, v, *(tensors[i] for i in wanted))]


flex_attention.register_fake(lambda q, k, v, *_: empty_results(q, v))
flex_attention_backward.register_fake(fake_gradients)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, score_tensors, mask_tensors, *offsets, ctx.score, ctx.mask, ctx.scale = inputs
    assert all(offset is None for offset in offsets), "only whole tensors are differentiated"
    ctx.wanted = [i for i, t in enumerate(score_tensors) if t.requires_grad]
    ctx.count = len(score_tensors)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, output[0], output[1], *score_tensors, *mask_tensors)


def _backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    mods = tensors[: ctx.count], tensors[ctx.count :], None, None, None, ctx.score, ctx.mask, ctx.scale
    dq, dk, dv, *others = torch.ops.fxshard.flex_attention_backward(grad, grad_lse, q, k, v, out, lse, *mods, ctx.wanted)
    given = dict(zip(ctx.wanted, others, strict=True))
    return dq, dk, dv, [given.get(i) for i in range(ctx.count)], [None] * (len(tensors) - ctx.count), *[None] * 6


torch.library.register_autograd("fxshard::flex_attention", _backward, setup_context=_setup)


def _some_scores(q: Tensor, k: Tensor) -> Tensor:
    rows = min(_rows(q, k), q.shape[2]) if k.numel() and q.numel() else 0
    return q.new_empty([*q.shape[:2], rows, k.shape[2]], dtype=lse_dtype(q))


def _most(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What ``flex_attention`` allocates if all keys are seen."""
    scores = _some_scores(q, k)
    weights = (scores + 1).exp()
    return (*empty_results(q, v)[:2], weights.amax(-1).new_empty(q.shape[:-1]))


def _most_of_backward(grad: Tensor, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> list[Tensor]:
    raw = _some_scores(q, k)
    weights = (raw + 1).exp()
    of_weights = raw - 1
    _ = weights * (of_weights - 1), raw * 2
    return [t.new_empty(t.shape, dtype=lse.dtype) for t in (q, k, v)] + fake_gradients(grad, grad_lse, q, k, v, out, lse, *rest)[3:]


ALLOCATIONS[torch.ops.fxshard.flex_attention.default] = _most
ALLOCATIONS[torch.ops.fxshard.flex_attention_backward.default] = _most_of_backward
