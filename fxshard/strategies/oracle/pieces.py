"""One tensor on one simulated axis: splits it into the ranks' local tensors by a placement, and checks reassembled results."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import REDUCE_OPS, chunk
from fxshard.strategies.engine.conversion import has_reduction, identity, is_inexact

CLOSE = 1e-8
"""Tolerance in float64, relative to the greatest magnitude in a tensor; its square root for narrower floats."""

ROUNDED = 16
"""Allowed error of a sum whose parts cancel, in units in the last place of its greatest part."""


def cut(x: torch.Tensor, placement: Placement, ranks: int, seed: int) -> list[torch.Tensor]:
    """The local tensors of ``x`` on all ranks; ``seed`` determines the parts of a pending reduction."""
    if isinstance(placement, Shard):
        return [x.narrow(placement.dim, *chunk(x.shape[placement.dim], ranks, i)).clone() for i in range(ranks)]
    if isinstance(placement, Partial):
        return parts(x, placement.reduce_op, ranks, seed)
    return [x.clone() for _ in range(ranks)]


def non_contiguous(x: torch.Tensor) -> torch.Tensor:
    """A copy with reversed strides and gaps, like the transpose of a slice."""
    room = x.new_zeros((*reversed(x.shape), 2))[..., 0]
    return room.permute(*reversed(range(x.ndim))).copy_(x) if x.ndim else x.clone()


def parts(x: torch.Tensor, op: str, ranks: int, seed: int) -> list[torch.Tensor]:
    """``ranks`` tensors whose reduction by ``op`` is ``x``, permuted over ranks separately for each element.

    With an odd seed, parts of a maximum or minimum may be infinite, and parts of an integer sum may wrap around: both occur in
    programs, from empty shards and from overflow.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.stack((_float_parts if is_inexact(x.dtype) else _integer_parts)(x, op, ranks, generator, bool(seed % 2)))
    order = torch.rand(found.shape, generator=generator).argsort(0)
    return list(found.gather(0, order).unbind(0))


def _float_parts(x: torch.Tensor, op: str, ranks: int, generator: torch.Generator, wild: bool) -> list[torch.Tensor]:
    """Parts with noise of both signs, away from zero and as large as ``x``; in units of a power of two over 4096, so that parts of zero
    cancel exactly."""
    unit = 1.0 if op == "product" else power_of_two(x)
    size = [torch.randint(2048, 6145, x.shape, generator=generator) * (unit / 4096) for _ in range(ranks - 1)]
    if op in ("max", "min"):
        size = [s.where(s < 1.25 * unit, math.inf) for s in size] if wild else size
        return [x, *(_hidden_part(x, s, op, unit) for s in size)]
    signs = [torch.rand(x.shape, generator=generator) < 0.5 for _ in size]
    noise = [s.where(sign, -s).to(x.dtype) for s, sign in zip(size, signs, strict=True)]
    if op == "product":
        return [*noise, x / math.prod(noise)]
    return [*noise, (x if op == "sum" else x * ranks) - sum(noise)]


def _hidden_part(x: torch.Tensor, size: torch.Tensor, op: str, unit: float) -> torch.Tensor:
    """A part that a maximum or minimum ignores, sometimes zero; where ``x`` is infinite or NaN, the part is equal to it."""
    away = size.to(x.dtype)
    part = x - away if op == "max" else x + away
    hidden = x > 0 if op == "max" else x < 0
    return part.where(~(hidden & (size < 0.75 * unit)), torch.zeros_like(x)).where(x.isfinite(), x)


def power_of_two(x: torch.Tensor) -> float:
    """The power of two nearest to the greatest magnitude in ``x``, at most 2^100; 1 if all are zero."""
    greatest = _greatest(x)
    return 2.0 ** min(round(math.log2(greatest)), 100) if greatest else 1.0


def _greatest(x: torch.Tensor) -> float:
    """The greatest finite magnitude of an element."""
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def _integer_parts(x: torch.Tensor, op: str, ranks: int, generator: torch.Generator, wild: bool) -> list[torch.Tensor]:
    """Parts of integers or booleans. If ``wild``, noise has the full range and some parts of a maximum or minimum are the identity element,
    as for empty shards."""
    low, high = (-(2**63), 2**63 - 1) if wild else (-3, 4)
    noise = [torch.randint(low, high, x.shape, generator=generator).to(x.dtype) for _ in range(ranks - 1)]
    if x.dtype == torch.bool:
        noise = [torch.randint(2, x.shape, generator=generator).bool() for _ in noise]
    if op == "sum":
        return [*noise, x - sum(noise)]
    if op == "product":
        odd = [n | 1 for n in noise]
        return [*odd, x * math.prod(map(_inverse, odd))]
    end = torch.full_like(x, identity(op, x.dtype))
    drawn = [n.where(torch.rand(x.shape, generator=generator) < 0.75, end) if wild else _near(x, n, op) for n in noise]
    return [x, *((torch.minimum if op == "max" else torch.maximum)(x, n) for n in drawn)]


def _near(x: torch.Tensor, noise: torch.Tensor, op: str) -> torch.Tensor:
    return noise if x.dtype == torch.bool else x - noise.abs() if op == "max" else x + noise.abs()


def _inverse(odd: torch.Tensor) -> torch.Tensor:
    """The inverse of an odd integer modulo 2^bits, by Newton's iteration: 3 correct bits at first, twice as many each time."""
    return functools.reduce(lambda x, _: x * (2 - odd * x), range(5), odd)


def tolerance(tensors: Sequence[torch.Tensor]) -> float:
    """Tolerance of results, relative to their greatest magnitude, for the narrowest floating-point dtype of ``tensors``."""
    narrow = any(is_inexact(t.dtype) and t.dtype not in (torch.float64, torch.complex128) for t in tensors)
    return CLOSE**0.5 if narrow else CLOSE


def valid_placements(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, limit: float = CLOSE) -> tuple[Placement, ...]:
    """Every placement with which the pieces form ``whole``, replicated first; a piece is None if its rank ran nothing."""
    present = [p for p in pieces if p is not None]
    if not present or any(p.dtype != whole.dtype or p.ndim != whole.ndim for p in present):
        return ()
    same = len(present) == len(pieces) and all(close(p, whole, limit) for p in present)
    shards = [Shard(d) for d in range(whole.ndim) if _joins(pieces, whole, d, limit)]
    pending = [Partial(op) for op in REDUCE_OPS if has_reduction(op, whole.dtype) and _reduces(pieces, whole, op, limit)]
    return (*([Replicate()] if same else []), *shards, *pending)


def holds(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, placement: Placement, limit: float = CLOSE) -> bool:
    """Whether the pieces form ``whole`` with ``placement``."""
    if isinstance(placement, Shard):
        return _joins(pieces, whole, placement.dim, limit)
    if isinstance(placement, Partial):
        return _reduces(pieces, whole, placement.reduce_op, limit)
    return all(p is not None and close(p, whole, limit) for p in pieces)


def _joins(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, dim: int, limit: float) -> bool:
    """Whether each piece equals its chunk of ``whole``; a rank that ran nothing must have an empty chunk."""
    for i, piece in enumerate(pieces):
        part = whole.narrow(dim, *chunk(whole.shape[dim], len(pieces), i))
        if part.numel() != 0 if piece is None else not close(piece, part, limit, whole):
            return False
    return True


def _reduces(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, op: str, limit: float) -> bool:
    """Whether the pieces reduce to ``whole``; sums and products are compared only at finite positions."""
    present = [p for p in pieces if p is not None]
    if any(p.shape != whole.shape for p in present):
        return False
    found = _reduced(present, op, len(pieces))
    rounds = 0.0
    if is_inexact(whole.dtype) and op not in ("max", "min"):
        finite = whole.isfinite()
        found, whole = found.where(finite, torch.zeros_like(found)), whole.where(finite, torch.zeros_like(whole))
        rounds = ROUNDED * torch.finfo(whole.dtype).eps * max(map(_greatest, present)) if op != "product" else 0.0
    return close(found, whole, limit, rounds=rounds)


def _reduced(pieces: Sequence[torch.Tensor], op: str, ranks: int) -> torch.Tensor:
    stacked = torch.stack(list(pieces))
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "avg":
        return stacked.sum(0) / ranks
    if op == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def close(piece: torch.Tensor, part: torch.Tensor, limit: float = CLOSE, whole: torch.Tensor | None = None, rounds: float = 0.0) -> bool:
    """Whether both are equal up to rounding: ``limit`` relative to the greatest magnitude in ``whole`` (default: ``part``), or ``rounds``
    absolute."""
    if piece.shape != part.shape or piece.dtype != part.dtype:
        return False
    if not is_inexact(piece.dtype):
        return torch.equal(piece, part)
    if piece.numel() == 0:
        return True
    limit = max(limit, tolerance([piece]))
    size = _greatest(part if whole is None else whole)
    return bool(torch.allclose(piece, part, rtol=limit, atol=max(limit * size, rounds), equal_nan=True))
