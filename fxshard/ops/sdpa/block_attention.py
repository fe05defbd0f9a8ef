"""``fxshard::block_attention`` and its backward: attention to a block of the keys, causal by an offset, without a mask in memory.

Query i sees key j of the block if ``j <= i + offset`` (if there is an offset), ``i >= first`` and ``j < keys``. Only scores that are seen
are computed: those of keys that every query sees, and those of the square on the diagonal. Results of several blocks are merged by their
logsumexp, as in FlashAttention (Dao et al., 2022) and ring attention (Liu et al., 2023).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fxshard.ops.kernels import ALLOCATIONS, operator
from fxshard.ops.sdpa.attention import lse_dtype, sdpa, sdpa_backward


class Part(NamedTuple):
    """A rectangle of the scores: queries from ``row`` on, keys ``start`` to ``stop``. ``causal``: of it, only j <= i."""

    row: int
    start: int
    stop: int
    causal: bool


def parts(rows: int, keys: int, offset: int | None, first: int = 0) -> list[Part]:
    """The parts of a (rows, keys) matrix of scores that are computed: at most one that is whole, and one on the diagonal."""
    assert offset is None or not first, "no caller needs both"
    if first >= rows or not keys:
        return []
    if offset is None or offset >= keys:
        return [Part(first, 0, keys, False)]
    row, start = max(0, -offset), max(0, offset)
    found = [Part(0, 0, start, False)] if start else []
    return found if row >= rows else [*found, Part(row, start, min(keys, rows + offset), True)]


@operator(lambda out, lse, *_: (out.new_empty(out.shape, dtype=lse.dtype), lse.new_empty(lse.shape)))
def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, logsumexp) of attention to two blocks of keys, from those of each, in the dtype of ``lse``. A query that sees no key of a block
    has out 0 and logsumexp -inf there."""
    total = torch.logaddexp(lse, other_lse)
    known = total.masked_fill(total == -math.inf, 0.0)
    first, second = ((part - known).exp().unsqueeze(-1) for part in (lse, other_lse))
    return out * first + other * second, total


def _empty(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_zeros([*q.shape[:-1], v.shape[-1]]), q.new_full(q.shape[:-1], -math.inf, dtype=lse_dtype(q))


def _number(value: torch.Tensor | None) -> int | None:
    return None if value is None else int(value)


def _parts_of(
    q: torch.Tensor, k: torch.Tensor, offset: torch.Tensor | None, first: torch.Tensor | None, keys: torch.Tensor | None
) -> list[Part]:
    if not q.numel() or not k.numel():
        return []
    count = _number(keys)
    return parts(q.shape[-2], k.shape[-2] if count is None else count, _number(offset), _number(first) or 0)


def _seen(k: torch.Tensor, part: Part) -> torch.Tensor:
    return k[..., part.start : part.stop, :]


@torch.library.custom_op("fxshard::block_attention", mutates_args=())
def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offset: torch.Tensor | None,
    first: torch.Tensor | None,
    keys: torch.Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [b, h, s, d] over a block k, v [b, h or h/g, t, d] -> (out [b, h, s, d], logsumexp [b, h, s]).

    ``offset``, ``first``, ``keys``: int64 scalars or None: the first query's position less the first key's, the first query that sees
    any key (without an offset), and the number of keys that are seen.
    """
    out, lse = _empty(q, v)
    for part in _parts_of(q, k, offset, first, keys):
        some, some_lse = sdpa(q[..., part.row :, :], _seen(k, part), _seen(v, part), None, part.causal, scale, enable_gqa)
        if part == (0, 0, part.stop, part.causal):
            out, lse = some, some_lse
        elif part.row:
            out[..., part.row :, :], lse[..., part.row :] = some, some_lse
        else:
            out, lse = merge_attention(out, lse, some, some_lse)
    return out.to(q.dtype), lse


@torch.library.custom_op("fxshard::block_attention_backward", mutates_args=())
def block_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    offset: torch.Tensor | None,
    first: torch.Tensor | None,
    keys: torch.Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's share of the gradients of q, k and v; ``out`` and ``lse`` are those of attention to all blocks."""
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for part in _parts_of(q, k, offset, first, keys):
        of_rows = [t[..., part.row :, :] for t in (grad, q, out)]
        own_lse = lse[..., part.row :].contiguous()  # kernels read it as such
        grads = sdpa_backward(
            of_rows[0], of_rows[1], _seen(k, part), _seen(v, part), of_rows[2], own_lse, None, part.causal, scale, enable_gqa
        )
        dq[..., part.row :, :] += grads[0]
        dk[..., part.start : part.stop, :], dv[..., part.start : part.stop, :] = grads[1:]
    return dq, dk, dv


block_attention.register_fake(
    lambda q, k, v, *_: (q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q)))
)
block_attention_backward.register_fake(lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)))


def _most(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``block_attention`` allocates if all keys are seen, and the diagonal is a part of its own."""
    scale, enable_gqa = rest[-2:]
    out, lse = sdpa(q, k, v, None, False, scale, enable_gqa)
    if offset is not None:
        square = min(q.shape[-2], k.shape[-2])
        out, lse = merge_attention(out, lse, *sdpa(q, k[..., :square, :], v[..., :square, :], None, True, scale, enable_gqa))
    return out.to(q.dtype), lse


def _most_of_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    totals = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for total, share in zip(totals, sdpa_backward(grad, q, k, v, out, lse, None, False, *rest[-2:]), strict=True):
        total += share
    return totals


ALLOCATIONS[torch.ops.fxshard.block_attention.default] = _most
ALLOCATIONS[torch.ops.fxshard.block_attention_backward.default] = _most_of_backward
