"""One tensor on one simulated axis: cut by a placement into what each rank holds, and put together again to be judged."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import REDUCE_OPS, chunk
from fxshard.strategies.engine.conversion import has_reduction, identity, is_real

CLOSE = 1e-8
"""Relative to the greatest number of a tensor in float64; the root of that, about, in narrower floats."""

ROUNDED = 16
"""Units in the last place of its greatest part by which a sum of few parts may be off, where the parts cancel."""


def cut(x: torch.Tensor, placement: Placement, ranks: int, seed: int) -> list[torch.Tensor]:
    """What each rank holds of ``x``; the parts of a pending reduction differ with ``seed``."""
    if isinstance(placement, Shard):
        return [x.narrow(placement.dim, *chunk(x.shape[placement.dim], ranks, i)).clone() for i in range(ranks)]
    if isinstance(placement, Partial):
        return parts(x, placement.reduce_op, ranks, seed)
    return [x.clone() for _ in range(ranks)]


def scattered(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory in another order and with gaps, as in a transpose of a part of something larger."""
    room = x.new_zeros((*reversed(x.shape), 2))[..., 0]
    return room.permute(*reversed(range(x.ndim))).copy_(x) if x.ndim else x.clone()


def parts(x: torch.Tensor, op: str, ranks: int, seed: int) -> list[torch.Tensor]:
    """``ranks`` tensors whose reduction by ``op`` is ``x``, each element dealt to the ranks in an order of its own.

    Parts of an extreme may be infinite, and parts of a sum of whole numbers anything that wraps around to it (with an
    odd seed): both occur where a shard is empty, or where a sum overflows.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.stack((_real if is_real(x.dtype) else _whole)(x, op, ranks, generator, bool(seed % 2)))
    order = torch.rand(found.shape, generator=generator).argsort(0)
    return list(found.gather(0, order).unbind(0))


def _real(x: torch.Tensor, op: str, ranks: int, generator: torch.Generator, wild: bool) -> list[torch.Tensor]:
    """Noise of both signs, away from zero, as large as ``x``; in 4096ths of a power of two, so that zeros are made up exactly."""
    unit = 1.0 if op == "product" else power_of_two(x)
    size = [torch.randint(2048, 6145, x.shape, generator=generator) * (unit / 4096) for _ in range(ranks - 1)]
    if op in ("max", "min"):
        size = [s.where(s < 1.25 * unit, math.inf) for s in size] if wild else size
        return [x, *(_beside(x, s, op, unit) for s in size)]
    signs = [torch.rand(x.shape, generator=generator) < 0.5 for _ in size]
    noise = [s.where(sign, -s).to(x.dtype) for s, sign in zip(size, signs, strict=True)]
    if op == "product":
        return [*noise, x / math.prod(noise)]
    return [*noise, (x if op == "sum" else x * ranks) - sum(noise)]


def _beside(x: torch.Tensor, size: torch.Tensor, op: str, unit: float) -> torch.Tensor:
    """A part that an extreme hides: zero here and there, where it may be. What is infinite has no number beside it: all parts are it."""
    away = size.to(x.dtype)
    part = x - away if op == "max" else x + away
    hidden = x > 0 if op == "max" else x < 0
    return part.where(~(hidden & (size < 0.75 * unit)), torch.zeros_like(x)).where(x.isfinite(), x)


def power_of_two(x: torch.Tensor) -> float:
    """About as large as the greatest number of ``x``."""
    greatest = _greatest(x)
    return 2.0 ** min(round(math.log2(greatest)), 100) if greatest else 1.0


def _greatest(x: torch.Tensor) -> float:
    """The largest finite size of an element."""
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def _whole(x: torch.Tensor, op: str, ranks: int, generator: torch.Generator, wild: bool) -> list[torch.Tensor]:
    """With wild noise some parts of an extreme are the least or greatest number of all, as those of empty shards are."""
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
    """The number whose product with ``odd`` wraps around to 1: right in three bits at first, then in twice as many each time."""
    return functools.reduce(lambda x, _: x * (2 - odd * x), range(5), odd)


def tolerance(tensors: Sequence[torch.Tensor]) -> float:
    """How far results may be off, relative to their greatest number: as far as the narrowest of real ``tensors`` rounds."""
    narrow = any(is_real(t.dtype) and t.dtype not in (torch.float64, torch.complex128) for t in tensors)
    return CLOSE**0.5 if narrow else CLOSE


def valid_placements(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, limit: float = CLOSE) -> tuple[Placement, ...]:
    """Every placement by which the pieces make up ``whole``, replicated first; None: a rank that had nothing to run on."""
    present = [p for p in pieces if p is not None]
    if not present or any(p.dtype != whole.dtype or p.ndim != whole.ndim for p in present):
        return ()
    same = len(present) == len(pieces) and all(close(p, whole, limit) for p in present)
    shards = [Shard(d) for d in range(whole.ndim) if _joins(pieces, whole, d, limit)]
    pending = [Partial(op) for op in REDUCE_OPS if has_reduction(op, whole.dtype) and _reduces(pieces, whole, op, limit)]
    return (*([Replicate()] if same else []), *shards, *pending)


def holds(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, placement: Placement, limit: float = CLOSE) -> bool:
    """Whether the pieces make up ``whole`` by ``placement``."""
    if isinstance(placement, Shard):
        return _joins(pieces, whole, placement.dim, limit)
    if isinstance(placement, Partial):
        return _reduces(pieces, whole, placement.reduce_op, limit)
    return all(p is not None and close(p, whole, limit) for p in pieces)


def _joins(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, dim: int, limit: float) -> bool:
    """Each piece is its chunk of ``whole``; a rank that ran nothing must own nothing."""
    for i, piece in enumerate(pieces):
        part = whole.narrow(dim, *chunk(whole.shape[dim], len(pieces), i))
        if part.numel() != 0 if piece is None else not close(piece, part, limit, whole):
            return False
    return True


def _reduces(pieces: Sequence[torch.Tensor | None], whole: torch.Tensor, op: str, limit: float) -> bool:
    """Where the whole is infinite, parts of a sum or a product have no numbers to add."""
    present = [p for p in pieces if p is not None]
    if any(p.shape != whole.shape for p in present):
        return False
    found = _reduced(present, op, len(pieces))
    rounds = 0.0
    if is_real(whole.dtype) and op not in ("max", "min"):
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
    """Equal but for rounding, which is relative to the greatest number of ``whole`` (of ``part``, if not given), or is ``rounds``."""
    if piece.shape != part.shape or piece.dtype != part.dtype:
        return False
    if not is_real(piece.dtype):
        return torch.equal(piece, part)
    if piece.numel() == 0:
        return True
    limit = max(limit, tolerance([piece]))
    size = _greatest(part if whole is None else whole)
    return bool(torch.allclose(piece, part, rtol=limit, atol=max(limit * size, rounds), equal_nan=True))
