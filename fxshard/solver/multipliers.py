"""Memory as prices: the Lagrangian of the limits, in integers that never promise too much."""

from __future__ import annotations

import numpy as np

from .arrays import FloatArray
from .model import Model
from .uses import UseTable


class MemoryPrices:
    """Turns multipliers lambda (rows,), cost per byte, into node costs."""

    def __init__(self, model: Model) -> None:
        self.limits = model.limits
        self._uses = UseTable(model)

    def round(self, multipliers: FloatArray) -> FloatArray:
        """Nearby multipliers >= 0 whose cumulative sums are exact in float64."""
        total = float(multipliers.sum())
        if total <= 0.0:
            return np.zeros_like(multipliers)
        step = float(2.0 ** (np.ceil(np.log2(total)) - 48))
        rounded: FloatArray = np.floor(np.maximum(multipliers, 0.0) / step) * step
        return rounded

    def prices(self, multipliers: FloatArray) -> FloatArray:
        """lambda u_i per state (states,), integers rounded down; multipliers as given by `round`."""
        cumulated = np.concatenate([[0.0], np.cumsum(multipliers)])
        terms = self._uses.amount * (cumulated[self._uses.hi] - cumulated[self._uses.lo])
        return self._uses.sum(np.floor(terms * (1 - 2.0**-50)))  # the product may have been rounded up

    def allowance(self, multipliers: FloatArray) -> float:
        """lambda . limits, an integer rounded up: what the prices of a plan that fits cannot exceed."""
        total = float(multipliers @ self.limits)
        return float(np.ceil(total * (1 + 1e-13))) + 1.0 if total > 0.0 else 0.0
