"""The Lagrangian of the rows' limits, in integers rounded so that bounds stay valid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, starts
from fxshard.solver.problem.model import Model
from fxshard.solver.problem.transfers import Transfers

NOTHING = 1e-250
"""Multipliers with a smaller sum count as zero, since floats that small lose digits."""


class RowPrices:
    """Converts multipliers lambda (rows,), cost per unit of a row, at most its slope, into node costs and transfer prices."""

    def __init__(self, model: Model) -> None:
        self.limits, self.slopes = model.limits, model.slopes
        self._transfers, self._moving = model.transfers, model.moving
        self._uses = model.use_table

    def round(self, multipliers: FloatArray) -> FloatArray:
        """Nearby multipliers between 0 and the slopes, with cumulative sums that are exact in float64."""
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
        """The transfers with prices that include lambda u, None where no row uses transfers."""
        if self._moving.empty:
            return None
        extra = self._moving.weighted(_cumulated(multipliers), len(self._transfers))
        return Transfers(replace(t, prices=t.prices + _down(more)) for t, more in zip(self._transfers, extra, strict=True))

    def priced(self, model: Model, multipliers: FloatArray) -> Model:
        """The model with the multipliers included in costs and prices; the same object if they are all 0."""
        if not multipliers.any():
            return model
        theta = np.concatenate([*model.costs, np.zeros(0)]) + self.prices(multipliers)
        costs = np.split(theta, starts([len(c) for c in model.costs])[1:-1])
        transfers = self.transfers(multipliers)
        return replace(model, costs=costs, transfers=model.transfers if transfers is None else transfers)

    def allowance(self, multipliers: FloatArray) -> float:
        """lambda . limits, rounded up to an integer: an upper bound on the priced use of any plan that fits."""
        total = float(multipliers @ self.limits)
        return float(np.ceil(total + 1e-13 * float(multipliers @ np.abs(self.limits)))) + 1.0 if multipliers.any() else 0.0


def _cumulated(multipliers: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(multipliers)])


def _down(terms: FloatArray | float) -> FloatArray:
    """The terms rounded down, with an allowance for products that were rounded up."""
    return np.asarray(np.floor(np.asarray(terms) * (1 - 2.0**-50)))
