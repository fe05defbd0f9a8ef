"""Move unavoidable cost to the constant, and forbid entries that alone reach the cutoff."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Undo


class Normalise:
    """Row and column minima of edges move to nodes, node minima to the constant; then every entry is >= 0.

    An entry that reaches the cutoff together with the constant is in no better plan and becomes `inf`.
    """

    name = "move certain cost to the constant"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The equivalent model with nonnegative tables."""
        costs, edges, constant = list(model.costs), {}, model.constant
        for (i, j), table in model.edges.items():
            rows = _finite(table.min(axis=1, initial=np.inf))
            if rows.any():
                table, costs[i] = table - rows[:, None], costs[i] + rows
            columns = _finite(table.min(axis=0, initial=np.inf))
            if columns.any():
                table, costs[j] = table - columns, costs[j] + columns
            edges[i, j] = table
        for node, cost in enumerate(costs):
            least = float(cost.min(initial=np.inf))
            if np.isinf(least):
                raise Exhausted
            if least:
                costs[node], constant = cost - least, constant + least
        room = model.cutoff - constant
        if room <= 0:
            raise Exhausted
        if np.isfinite(room):
            costs = [_forbid(cost, cost, room) for cost in costs]
            for (i, j), table in edges.items():
                edges[i, j] = _forbid(table, costs[i][:, None] + table + costs[j], room)
        return replace(model, costs=costs, edges=edges, constant=constant), lambda choices: choices


def _finite(values: FloatArray) -> FloatArray:
    return np.where(np.isinf(values), 0.0, values)


def _forbid(table: FloatArray, least: FloatArray, room: float) -> FloatArray:
    """The table with `inf` where `least`, a lower bound on the cost that the entry adds, reaches the room below the cutoff."""
    bad = (least >= room) & np.isfinite(table)
    return np.where(bad, np.inf, table) if bad.any() else table
