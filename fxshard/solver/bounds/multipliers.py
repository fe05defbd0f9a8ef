"""Rows as prices: the Lagrangian of their limits, in integers that never promise too much."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, starts
from fxshard.solver.problem.model import Model
from fxshard.solver.problem.transfers import Transfers

NOTHING = 1e-250
"""Multipliers that add up to less count as none: floats that small lose digits."""


class RowPrices:
    """Turns multipliers lambda (rows,), cost per unit of each row and at most its slope, into costs of nodes and prices of transfers."""

    def __init__(self, model: Model) -> None:
        self.limits, self.slopes = model.limits, model.slopes
        self._transfers, self._moving = model.transfers, model.moving
        self._uses = model.use_table

    def round(self, multipliers: FloatArray) -> FloatArray:
        """Nearby multipliers >= 0, no greater than the slopes, whose cumulative sums are exact in float64."""
        multipliers = np.minimum(multipliers, self.slopes)
        total = float(multipliers.sum())
        if total <= NOTHING:
            return np.zeros_like(multipliers)
        step = float(2.0 ** (np.ceil(np.log2(total)) - 48))
        rounded: FloatArray = np.floor(np.maximum(multipliers, 0.0) / step) * step
        return rounded

    def prices(self, multipliers: FloatArray) -> FloatArray:
        """lambda u_i per state (states,), integers rounded down; multipliers as given by `round`."""
        return self._uses.priced(_cumulated(multipliers))

    def rates(self, multipliers: FloatArray) -> FloatArray:
        """Cost per unit of each use of transfers, (uses,); multipliers as given by `round`."""
        cumulated = _cumulated(multipliers)
        return np.asarray(cumulated[self._moving.hi] - cumulated[self._moving.lo])

    def transfers(self, multipliers: FloatArray) -> Transfers | None:
        """The transfers at prices that include lambda u, None where no row counts any."""
        if self._moving.empty:
            return None
        extra = self._moving.weighted(_cumulated(multipliers), len(self._transfers))
        return Transfers(replace(t, prices=t.prices + _down(more)) for t, more in zip(self._transfers, extra, strict=True))

    def priced(self, model: Model, multipliers: FloatArray) -> Model:
        """A model in which rows cost their multipliers; it is returned as it is where none does."""
        if not multipliers.any():
            return model
        theta = np.concatenate([*model.costs, np.zeros(0)]) + self.prices(multipliers)
        costs = np.split(theta, starts([len(c) for c in model.costs])[1:-1])
        transfers = self.transfers(multipliers)
        return replace(model, costs=costs, transfers=model.transfers if transfers is None else transfers)

    def allowance(self, multipliers: FloatArray) -> float:
        """lambda . limits, an integer rounded up: what the prices of a plan that fits cannot exceed."""
        total = float(multipliers @ self.limits)
        return float(np.ceil(total + 1e-13 * float(multipliers @ np.abs(self.limits)))) + 1.0 if multipliers.any() else 0.0


def _cumulated(multipliers: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(multipliers)])


def _down(terms: FloatArray | float) -> FloatArray:
    """Whole numbers no greater: each product may have been rounded up."""
    return np.asarray(np.floor(np.asarray(terms) * (1 - 2.0**-50)))
