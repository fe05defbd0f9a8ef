"""Sums over a whole plan: memory over time, and rows that are limited or penalised beyond a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.transfers import Transfer

TOLERANCE = 1e-9
"""Relative slack on the limit of a hard row, for the rounding of float sums."""

Choices = Sequence[int] | IntArray


@dataclass(frozen=True)
class Live:
    """Memory in use at times lo <= t < hi, bytes >= 0: `amount` is (k,) per state of a node, or (given, wanted) of a transfer.

    A transfer uses its amount once for each distinct layout that its readers want, just as it pays its price.
    """

    lo: int
    hi: int
    amount: FloatArray
    node: int = -1
    transfer: int = -1

    def total(self, transfers: Sequence[Transfer], choices: Choices) -> float:
        """Bytes that the choices use."""
        if self.node >= 0:
            return float(self.amount[choices[self.node]])
        return transfers[self.transfer].sum(self.amount, choices)


@dataclass(frozen=True)
class Row:
    """A weighted sum that costs `slope` per unit above `limit`; a slope of `inf` makes the limit hard.

    nodes: (node, weights (k,) of its states), of any sign. transfers: (index, weights (given, wanted) >= 0), counted once for each
    distinct layout that the readers want.
    """

    limit: float
    nodes: tuple[tuple[int, FloatArray], ...] = ()
    transfers: tuple[tuple[int, FloatArray], ...] = ()
    slope: float = np.inf
    name: str = ""

    @property
    def hard(self) -> bool:
        """Whether the limit must not be exceeded."""
        return bool(np.isinf(self.slope))

    @property
    def ceiling(self) -> float:
        """The largest sum that counts as within the limit."""
        return self.limit + TOLERANCE * abs(self.limit) if self.hard else self.limit

    def penalty(self, total: float) -> float:
        """The cost of a sum."""
        if total <= self.ceiling:
            return 0.0
        return self.slope * (total - self.limit)
