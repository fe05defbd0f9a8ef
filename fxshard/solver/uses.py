"""All memory uses of a model as flat arrays."""

from __future__ import annotations

import numpy as np

from .arrays import FloatArray, IntArray
from .model import Model


class UseTable:
    """One entry per use and state: `amount` bytes in rows [lo, hi) for the state at `position` of all states."""

    def __init__(self, model: Model) -> None:
        starts = np.concatenate([[0], np.cumsum([len(cost) for cost in model.costs])]).astype(np.int64)
        uses = [(node, use) for node, terms in enumerate(model.uses) for use in terms]
        sizes = np.asarray([len(use.amount) for _, use in uses], dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        self.states = int(starts[-1])
        self.position = np.concatenate([np.arange(starts[node], starts[node + 1]) for node, _ in uses] or [none])
        self.amount = np.concatenate([use.amount for _, use in uses] or [np.zeros(0)])
        self.lo = np.repeat(np.asarray([use.lo for _, use in uses], dtype=np.int64), sizes)
        self.hi = np.repeat(np.asarray([use.hi for _, use in uses], dtype=np.int64), sizes)
        self._node = np.repeat(np.asarray([node for node, _ in uses], dtype=np.int64), sizes)
        self._first = np.repeat(np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64), sizes)

    def saved(self, row: int, choices: IntArray) -> FloatArray:
        """Bytes that changing to each state would free in one row (states,)."""
        live = np.flatnonzero((self.lo <= row) & (row < self.hi))
        now = self.amount[self._first[live] + choices[self._node[live]]]
        return self.sum(now - self.amount[live], live)

    def sum(self, values: FloatArray, entries: IntArray | None = None) -> FloatArray:
        """Values of entries (all by default) summed per state (states,)."""
        position = self.position if entries is None else self.position[entries]
        return np.bincount(position, weights=values, minlength=self.states).astype(np.float64)
