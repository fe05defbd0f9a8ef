"""What runs when on a rank, as predicted: data that the cost model makes and tables show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

DEVICE = "device"
"""The stream of the operators; collectives run on that of their axis."""


class Event(NamedTuple):
    """What runs on a stream from ``start`` to ``end``, microseconds; ``waited``: how long the device stood still for it.

    A tuple, for there is one for each call of a graph and each of its orders, and a frozen dataclass takes three times as long to make.
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
        """Microseconds in which the device stood still for collectives."""
        return math.fsum(e.waited for e in self.events)


@dataclass(frozen=True)
class PassEffect:
    """What a pass after lowering did to a program: its timeline ``before`` and ``after``, and how many collectives there were and are.

    ``left_out``: why its result was not taken; then ``after`` is what it would have been. None where it was.
    """

    name: str
    before: Timeline
    after: Timeline
    collectives: tuple[int, int]
    left_out: str | None = None
