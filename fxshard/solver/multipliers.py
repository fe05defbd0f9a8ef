"""Memory as prices: the Lagrangian of the limits, in integers that never promise too much."""

from __future__ import annotations

import numpy as np

from .model import Model
from .problem import FloatArray


class MemoryPrices:
    """Turns multipliers lambda (rows,), cost per byte, into node costs."""

    def __init__(self, model: Model) -> None:
        self.limits = model.limits
        starts = np.concatenate([[0], np.cumsum([len(cost) for cost in model.costs])]).astype(np.int64)
        uses = [(node, use) for node, terms in enumerate(model.uses) for use in terms]
        sizes = [len(use.amount) for _, use in uses]
        self._states = int(starts[-1])
        self._position = np.concatenate(
            [np.arange(starts[node], starts[node + 1]) for node, _ in uses] or [np.zeros(0, dtype=np.int64)]
        )
        self._amount = np.concatenate([use.amount for _, use in uses] or [np.zeros(0)])
        self._lo = np.repeat(np.asarray([use.lo for _, use in uses], dtype=np.int64), sizes)
        self._hi = np.repeat(np.asarray([use.hi for _, use in uses], dtype=np.int64), sizes)

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
        terms = self._amount * (cumulated[self._hi] - cumulated[self._lo])
        terms = np.floor(terms * (1 - 2.0**-50))  # the product may have been rounded up
        return np.bincount(self._position, weights=terms, minlength=self._states).astype(np.float64)

    def allowance(self, multipliers: FloatArray) -> float:
        """lambda . limits, an integer rounded up: what the prices of a plan that fits cannot exceed."""
        total = float(multipliers @ self.limits)
        return float(np.ceil(total * (1 + 1e-13))) + 1.0 if total > 0.0 else 0.0
