"""The predicted timeline of a rank, as data that the cost model makes and tables show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

DEVICE = "device"
"""The stream of the operators; collectives run on the stream of their axis, which has the axis' name."""


class Event(NamedTuple):
    """An operator or collective on a stream, from ``start`` to ``end`` in microseconds; ``waited``: how long the device waited for it.

    A tuple, because there is one for each call in each order of a graph that is tried, and a frozen dataclass takes three times as long
    to make.
    """

    name: str
    operator: str
    stream: str
    start: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """``total``: microseconds from the first operator to the last end of anything."""

    events: tuple[Event, ...]
    total: float

    @property
    def computing(self) -> float:
        return math.fsum(e.end - e.start for e in self.events if e.stream == DEVICE)

    @property
    def communicating(self) -> float:
        return math.fsum(e.end - e.start for e in self.events if e.stream != DEVICE)

    @property
    def waited(self) -> float:
        """Microseconds in which the device waited for collectives and did nothing else."""
        return math.fsum(e.waited for e in self.events)


@dataclass(frozen=True)
class PassEffect:
    """The effect of a pass after lowering: the timeline ``before`` and ``after``, and the number of ``collectives`` before and after.

    ``left_out``: why the pass's result was rejected, None if it was not; ``after`` is the timeline of the rejected result then.
    """

    name: str
    before: Timeline
    after: Timeline
    collectives: tuple[int, int]
    left_out: str | None = None
