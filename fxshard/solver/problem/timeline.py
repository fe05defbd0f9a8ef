"""Sums over time of amounts that each last for an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray


@dataclass(frozen=True)
class Timeline:
    """times: (k,) the times at which the sum changes, ascending. totals: (k,) the sum from each of them on; before the first it is 0."""

    times: IntArray
    totals: FloatArray

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], amounts: Sequence[float]) -> Timeline:
        """The timeline of amounts that each last for a half-open span [begin, end)."""
        ends = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
        times, place = np.unique(ends.T.ravel(), return_inverse=True)
        weights = np.asarray(amounts, dtype=np.float64)
        changes = np.bincount(place.ravel(), np.concatenate([weights, -weights]), minlength=len(times))
        return cls(times, np.cumsum(changes))

    def at(self, times: Sequence[int] | IntArray) -> FloatArray:
        """(t,) the sums at these times."""
        return np.append(self.totals, 0.0)[np.searchsorted(self.times, times, side="right") - 1]

    def peak(self) -> tuple[int, float]:
        """(time, sum) of the first maximum; (0, 0) where no sum is above 0."""
        if not len(self.times) or self.totals.max() <= 0:
            return 0, 0.0
        first = int(self.totals.argmax())
        return int(self.times[first]), float(self.totals[first])
