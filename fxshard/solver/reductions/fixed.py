"""Fold nodes with one state left into the costs of their neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.model import Model, Undo, drop_nodes


class FoldFixed:
    """Adds each edge of a node with one state and no uses to the neighbour's costs, and removes the node."""

    name = "fold nodes with one state"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The model without the fixed nodes."""
        fixed = {node for node, cost in enumerate(model.costs) if len(cost) == 1 and not model.uses[node]}
        if not fixed:
            return model, lambda choices: choices
        costs, edges, constant = list(model.costs), {}, model.constant
        for (i, j), table in model.edges.items():
            if i in fixed:
                costs[j] = costs[j] + table[0]
            elif j in fixed:
                costs[i] = costs[i] + table[:, 0]
            else:
                edges[i, j] = table
        constant += sum(float(costs[node][0]) for node in sorted(fixed))
        smaller, left = drop_nodes(replace(model, costs=costs, edges=edges, constant=constant), fixed)

        def undo(choices: IntArray) -> IntArray:
            old = np.zeros(len(model), dtype=np.int64)
            old[left] = choices
            return old

        return smaller, undo
