"""repeats: finds repetitions in a sequence. ``outline`` applies it to the nodes of a graph with repeated layers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RepeatedRun:
    """Items ``start`` to ``stop`` (exclusive) of a sequence. From the second period on, each equals the item ``period`` places before."""

    start: int
    stop: int
    period: int

    @property
    def saved(self) -> int:
        """The number of items in complete periods after the first."""
        return ((self.stop - self.start) // self.period - 1) * self.period


def encode(items: Iterable[Hashable]) -> np.ndarray:
    """A number for each item, equal for equal items, in the order of their first occurrence."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)


def find_runs(codes: np.ndarray, min_periods: int, min_saved: int) -> list[RepeatedRun]:
    """Disjoint runs of at least ``min_periods`` periods that save at least ``min_saved`` items each, in order.

    Greedy: takes the run that saves the most, then searches on both sides of it. Ties go to the shortest period, then to the first run.
    """
    return sorted(_within(codes, 0, len(codes), min_periods, min_saved), key=lambda run: run.start)


def _within(codes: np.ndarray, low: int, high: int, min_periods: int, min_saved: int) -> Iterator[RepeatedRun]:
    best = _best(codes[low:high], min_periods)
    if best is None or best.saved < min_saved:
        return
    start, stop = low + best.start, low + best.stop
    yield RepeatedRun(start, stop, best.period)
    yield from _within(codes, low, start, min_periods, min_saved)
    yield from _within(codes, stop, high, min_periods, min_saved)


def _best(codes: np.ndarray, min_periods: int) -> RepeatedRun | None:
    found: RepeatedRun | None = None
    for period in range(1, len(codes) // min_periods + 1):
        differs = np.flatnonzero(codes[period:] != codes[:-period])
        edges = np.concatenate(([-1], differs, [len(codes) - period]))
        lengths = np.diff(edges) - 1
        first = int(lengths.argmax())
        start = int(edges[first]) + 1
        run = RepeatedRun(start, start + int(lengths[first]) + period, period)
        if run.stop - run.start >= min_periods * period and (found is None or run.saved > found.saved):
            found = run
    return found
