"""Remove states that are forbidden, or that are compatible with no state of some neighbour."""

from __future__ import annotations

from collections import deque

import numpy as np

from fxshard.solver.problem.arrays import each
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Undo, keep_states


class ArcConsistency:
    """AC-3 on the finite entries (Mackworth 1977)."""

    name = "remove states without a partner"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The model without states that fail arc consistency."""
        alive = supported(model, budget)
        if all(each(alive, np.all)):
            return model, lambda choices: choices
        if any(not mask.any() for mask in alive):
            raise Exhausted
        return keep_states(model, [None if mask.all() else np.flatnonzero(mask) for mask in alive])


def supported(model: Model, budget: Budget = UNLIMITED) -> list[np.ndarray]:
    """Per node a mask (k_i,) of the arc-consistent states, at most those of finite cost; returns at the first node without any.

    States that a search cut short by the clock has not tried count as consistent.
    """
    alive = each(model.costs, np.isfinite)
    neighbours = model.neighbours()
    allowed = {pair: np.isfinite(table) for pair, table in model.edges.items()}
    queue = deque(range(len(model)))
    queued = [True] * len(model)
    while queue and not budget.late:
        node = queue.popleft()
        queued[node] = False
        for other in neighbours[node]:
            table = allowed[node, other] if node < other else allowed[other, node].T
            mask = alive[other] & table[alive[node]].any(axis=0)
            if not mask.any():
                alive[other] = mask
                return alive
            if mask.sum() < alive[other].sum():
                alive[other] = mask
                if not queued[other]:
                    queue.append(other)
                    queued[other] = True
    return alive
