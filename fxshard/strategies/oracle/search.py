"""Which combinations of input placements to try: all, or, beyond a budget, those near the rule's options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import REDUCE_OPS
from fxshard.strategies.engine.conversion import has_reduction, is_inexact

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
"""Operators whose kernels access memory out of bounds for inconsistent shapes: only offered combinations are run."""


@dataclass(frozen=True)
class Searched:
    """``combinations`` to try, out of ``possible``; ``why``: the reason if only offered ones may be tried."""

    combinations: tuple[Combination, ...]
    possible: int
    why: str = ""


def placements(x: torch.Tensor, pending: bool) -> list[Placement]:
    """The placements of an operand on one axis: replicated, sharded on a dim of size above 1, or pending in a reduction of its dtype."""
    shards = [Shard(d) for d, size in enumerate(x.shape) if size > 1]
    return [Replicate(), *shards, *(Partial(op) for op in REDUCE_OPS if pending and x.numel() and has_reduction(op, x.dtype))]


def search(op: str, tensors: Sequence[torch.Tensor], offered: Sequence[Combination], budget: int, written: Container[int] = ()) -> Searched:
    """All combinations except the replicated one if there are at most ``budget``; else the first ``budget`` in order of priority.

    Priority: offered combinations, one operand not replicated, one factor at a time (dims of equal size sharded together, in some
    operands), then offered ones with one or two operands changed. If there are floats, integers are taken for indices and never pending.
    ``written`` operands count as replicated: they have the layout of the result.
    """
    reals = any(is_inexact(t.dtype) for t in tensors)
    choices = [placements(t, pending=is_inexact(t.dtype) or t.dtype == torch.bool or not reals) for t in tensors]
    choices = [[Replicate()] if i in written else found for i, found in enumerate(choices)]
    possible = math.prod(map(len, choices)) - 1
    every: Iterable[Combination] = itertools.product(*choices) if possible <= budget else _by_priority(choices, offered, tensors)
    if op in UNCHECKED:
        every = offered
    whole = tuple(Replicate() for _ in tensors)
    distinct = dict.fromkeys(c for c in itertools.islice(every, 40 * budget) if c != whole)
    why = "its kernel reads out of bounds where shapes do not fit" if op in UNCHECKED else ""
    return Searched(tuple(itertools.islice(distinct, budget)), possible, why)


def _by_priority(
    choices: Sequence[Sequence[Placement]], offered: Sequence[Combination], tensors: Sequence[torch.Tensor]
) -> Iterator[Combination]:
    yield from offered
    whole: Combination = tuple(Replicate() for _ in choices)
    yield from _with_changes(whole, choices, 1)
    # All operands sharded on the same dim number, or pending in the same reduction, as far as possible.
    for placement in dict.fromkeys(p for options in choices for p in options):
        yield tuple(placement if placement in options else Replicate() for options in choices)
    yield from _by_factor(choices, tensors, ())
    yield from _by_factor(choices, tensors, (Partial("sum"),))
    for combination in offered:
        yield from _with_changes(combination, choices, 1)
    yield from _with_changes(whole, choices, 2)
    for combination in offered:
        yield from _with_changes(combination, choices, 2)


def _by_factor(
    choices: Sequence[Sequence[Placement]], tensors: Sequence[torch.Tensor], pending: Sequence[Placement]
) -> Iterator[Combination]:
    """Dims of one factor mostly have equal sizes: each operand is sharded on a dim of one size, replicated, or ``pending``."""
    sizes = dict.fromkeys(size for t in tensors for size in t.shape if size > 1)
    for size in sizes:
        here = [
            [p for p in options if p in (Replicate(), *pending) or (isinstance(p, Shard) and t.shape[p.dim] == size)]
            for options, t in zip(choices, tensors, strict=True)
        ]
        yield from itertools.product(*here)


def _with_changes(combination: Combination, choices: Sequence[Sequence[Placement]], changed: int) -> Iterator[Combination]:
    for places in itertools.combinations(range(len(choices)), changed):
        for values in itertools.product(*(choices[i] for i in places)):
            new = dict(zip(places, values, strict=True))
            yield tuple(new.get(i, p) for i, p in enumerate(combination))
