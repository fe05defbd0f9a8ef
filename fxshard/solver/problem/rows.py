"""Sums over a whole plan: memory while it is in use, and rows that are limited or cost something beyond a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.transfers import Transfer

TOLERANCE = 1e-9
"""Relative slack on the limit of a row that may not be exceeded: the rounding of a sum of floats."""

Choices = Sequence[int] | IntArray


@dataclass(frozen=True)
class Live:
    """Memory in use at times lo <= t < hi, bytes >= 0: of a node by its state, `amount` (k,), or of a transfer, (given, wanted).

    A transfer uses it once for each layout that its readers want, as it pays its price; a layout that costs nothing to have uses 0.
    """

    lo: int
    hi: int
    amount: FloatArray
    node: int = -1
    transfer: int = -1

    def total(self, transfers: Sequence[Transfer], choices: Choices) -> float:
        """Bytes under choices."""
        if self.node >= 0:
            return float(self.amount[choices[self.node]])
        return transfers[self.transfer].sum(self.amount, choices)


@dataclass(frozen=True)
class Row:
    """`slope` for each unit by which a sum exceeds `limit`; a slope of `inf` forbids that it does.

    nodes: (node, weight of each of its states), of any sign. transfers: (index, weights (given, wanted) >= 0), which count
    once for each layout that the readers want.
    """

    limit: float
    nodes: tuple[tuple[int, FloatArray], ...] = ()
    transfers: tuple[tuple[int, FloatArray], ...] = ()
    slope: float = np.inf
    name: str = ""

    @property
    def hard(self) -> bool:
        """Whether its limit may not be exceeded."""
        return bool(np.isinf(self.slope))

    @property
    def ceiling(self) -> float:
        """The largest sum that counts as within the limit."""
        return self.limit + TOLERANCE * abs(self.limit) if self.hard else self.limit

    def penalty(self, total: float) -> float:
        """What a sum costs."""
        if total <= self.ceiling:
            return 0.0
        return self.slope * (total - self.limit)
