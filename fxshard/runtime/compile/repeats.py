"""repeats: where a sequence repeats itself, for the nodes of a graph whose layers are alike; nothing here knows of models."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Run:
    """Items ``start`` to ``stop`` (not included) of a sequence, each equal to the one ``period`` items before, but the first ``period``."""

    start: int
    stop: int
    period: int

    @property
    def saved(self) -> int:
        """How many items are whole copies of others."""
        return ((self.stop - self.start) // self.period - 1) * self.period


def coded(items: Iterable[Hashable]) -> np.ndarray:
    """A number for each item, equal for equal items, in the order in which they are first met."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)


def find_runs(codes: np.ndarray, least: int, saves: int) -> list[Run]:
    """Runs of at least ``least`` periods that save at least ``saves`` items each, in order and apart from one another.

    Greedy: the run that saves the most, then what lies on both sides of it. Of equal ones the shortest period, then the first.
    """
    return sorted(_within(codes, 0, len(codes), least, saves), key=lambda run: run.start)


def _within(codes: np.ndarray, low: int, high: int, least: int, saves: int) -> Iterator[Run]:
    best = _best(codes[low:high], least)
    if best is None or best.saved < saves:
        return
    start, stop = low + best.start, low + best.stop
    yield Run(start, stop, best.period)
    yield from _within(codes, low, start, least, saves)
    yield from _within(codes, stop, high, least, saves)


def _best(codes: np.ndarray, least: int) -> Run | None:
    found: Run | None = None
    for period in range(1, len(codes) // least + 1):
        differs = np.flatnonzero(codes[period:] != codes[:-period])
        edges = np.concatenate(([-1], differs, [len(codes) - period]))
        lengths = np.diff(edges) - 1
        first = int(lengths.argmax())
        start = int(edges[first]) + 1
        run = Run(start, start + int(lengths[first]) + period, period)
        if run.stop - run.start >= least * period and (found is None or run.saved > found.saved):
            found = run
    return found
