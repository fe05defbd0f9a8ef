"""Which combinations of input placements to try: all of them, or, beyond a budget, those near what the rule offers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout import REDUCE_OPS
from fxshard.strategies.conversion import has_reduction, is_real

Combination = tuple[Placement, ...]
UNCHECKED = frozenset(
    f"aten.{name}.default"
    for name in (
        "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d_backward",
        "avg_pool2d_backward",
        "avg_pool3d_backward",
        "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward",
        "_native_batch_norm_legit",
    )
)
"""Operators whose kernels read and write out of bounds where shapes do not fit: only what is offered is run."""


@dataclass(frozen=True)
class Searched:
    """``combinations`` to try, out of ``possible`` ones; ``why``: what keeps it to those that are offered."""

    combinations: tuple[Combination, ...]
    possible: int
    why: str = ""


def placements(x: torch.Tensor, pending: bool) -> list[Placement]:
    """What an operand may be on one axis: whole, cut on a dim that can be cut, or pending in a reduction of its dtype."""
    shards = [Shard(d) for d, size in enumerate(x.shape) if size > 1]
    return [Replicate(), *shards, *(Partial(op) for op in REDUCE_OPS if pending and x.numel() and has_reduction(op, x.dtype))]


def search(op: str, tensors: Sequence[torch.Tensor], offered: Sequence[Combination], budget: int, written: Container[int] = ()) -> Searched:
    """All combinations but the replicated one if they are at most ``budget``; else the led ones, that many at most.

    Operands that are ``written`` stand as replicated: they lie as what is written.

    Led: one operand or two not replicated, then what is offered with one or two operands changed. Whole numbers beside
    real ones are taken for places: they are never pending.
    """
    reals = any(is_real(t.dtype) for t in tensors)
    choices = [placements(t, pending=is_real(t.dtype) or t.dtype == torch.bool or not reals) for t in tensors]
    choices = [[Replicate()] if i in written else found for i, found in enumerate(choices)]
    possible = math.prod(map(len, choices)) - 1
    every: Iterable[Combination] = itertools.product(*choices) if possible <= budget else _led(choices, offered)
    if op in UNCHECKED:
        every = offered
    whole = tuple(Replicate() for _ in tensors)
    distinct = dict.fromkeys(c for c in itertools.islice(every, 40 * budget) if c != whole)
    why = "its kernel reads out of bounds where shapes do not fit" if op in UNCHECKED else ""
    return Searched(tuple(itertools.islice(distinct, budget)), possible, why)


def _led(choices: Sequence[Sequence[Placement]], offered: Sequence[Combination]) -> Iterator[Combination]:
    yield from offered
    whole: Combination = tuple(Replicate() for _ in choices)
    yield from _near(whole, choices, 1)
    # Each operand cut on its like-numbered dim, or pending in the same reduction, where it can be.
    for placement in dict.fromkeys(p for options in choices for p in options):
        yield tuple(placement if placement in options else Replicate() for options in choices)
    for combination in offered:
        yield from _near(combination, choices, 1)
    yield from _near(whole, choices, 2)
    for combination in offered:
        yield from _near(combination, choices, 2)


def _near(combination: Combination, choices: Sequence[Sequence[Placement]], changed: int) -> Iterator[Combination]:
    for places in itertools.combinations(range(len(choices)), changed):
        for values in itertools.product(*(choices[i] for i in places)):
            new = dict(zip(places, values, strict=True))
            yield tuple(new.get(i, p) for i, p in enumerate(combination))
