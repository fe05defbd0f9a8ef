"""Remove states that another state of the same node dominates for all choices of the neighbours."""

from __future__ import annotations

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.model import Model, Undo, keep_states

MAX_CHUNK = 4_000_000


class Dominance:
    """State a dominates b if c_a - c_b + sum_edges max_x (e[a, x] - e[b, x]) <= 0 and a uses no more of any row.

    Goldstein's criterion of dead-end elimination (1994). Of states that dominate each other the first stays.
    """

    name = "remove dominated states"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The model without dominated states."""
        neighbours = model.neighbours()
        keep: list[IntArray | None] = [None] * len(model)
        for node, cost in enumerate(model.costs):
            if len(cost) > 1 and not budget.late:
                tables = [model.table(node, other) for other in neighbours[node]]
                beaten = _beaten(cost, tables, [use.amount for use in model.uses[node]])
                if beaten.any():
                    keep[node] = np.flatnonzero(~beaten)
        if all(kept is None for kept in keep):
            return model, lambda choices: choices
        return keep_states(model, keep)


def _beaten(cost: FloatArray, tables: list[FloatArray], amounts: list[FloatArray]) -> np.ndarray:
    """Mask (k,) of the states that another one dominates."""
    with np.errstate(invalid="ignore"):
        excess = cost[:, None] - cost  # excess[a, b]: extra cost of a over b
        possible = ~np.eye(len(cost), dtype=bool)
        for amount in amounts:
            possible &= amount[:, None] <= amount
        sample = excess
        for table in tables:  # the best column of each b already rules out most pairs
            best = table.argmin(axis=1)
            sample = sample + (table[:, best] - table[np.arange(len(cost)), best])
        a, b = np.nonzero(possible & (sample <= 0))
        total = excess[a, b]
        for table in sorted(tables, key=lambda t: t.shape[1]):
            if not len(a):
                break
            total = total + _largest_difference(table, a, b)
    dominates = np.zeros((len(cost), len(cost)), dtype=bool)
    dominates[a, b] = total <= 0
    first = np.arange(len(cost))
    superfluous = dominates & (~dominates.T | (first[:, None] < first))
    return np.asarray(superfluous.any(axis=0))


def _largest_difference(table: FloatArray, a: IntArray, b: IntArray) -> FloatArray:
    """max_x (table[a, x] - table[b, x]) per pair, over the x that are allowed with b."""
    chunk = max(1, MAX_CHUNK // table.shape[1])
    parts = []
    for start in range(0, len(a), chunk):
        low = table[b[start : start + chunk]]
        difference = np.where(np.isinf(low), -np.inf, table[a[start : start + chunk]] - low)
        parts.append(difference.max(axis=1))
    return np.concatenate(parts)
