"""Merge neighbouring nodes where one determines the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Pair, Undo, add_edge, drop_nodes
from fxshard.solver.problem.row_uses import Use


class MergeDetermined:
    """Where each state of i allows a single state f(x_i) of j, moves the costs, uses and edges of j to i."""

    name = "merge nodes that a neighbour determines"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The model without the nodes that are a function of another."""
        work = _Merger(model)
        queue = list(model.edges)
        while queue:
            queue = [pair for key in queue if key in work.edges and not budget.late for pair in work.merge_determined(*key)]
        return work.finish()


class _Merger:
    """The tables during merging, and the merges so far: (kept node, removed node, the state of the latter per state of the former)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.costs, self.edges, self.uses = list(model.costs), dict(model.edges), list(model.uses)
        self.adjacent = [set(neighbours) for neighbours in model.neighbours()]
        self.merged: list[tuple[int, int, IntArray]] = []

    def merge_determined(self, i: int, j: int) -> list[Pair]:
        """Merge the nodes of an edge if one determines the other; returns the edges that changed."""
        finite = np.isfinite(self.edges[i, j])
        forward, backward = bool((finite.sum(axis=1) == 1).all()), bool((finite.sum(axis=0) == 1).all())
        if forward and backward:  # keep the node with more uses and edges
            backward = len(self.uses[j]) + len(self.adjacent[j]) > len(self.uses[i]) + len(self.adjacent[i])
        if backward:
            return self._merge(j, i, finite.argmax(axis=0))
        return self._merge(i, j, finite.argmax(axis=1)) if forward else []

    def _merge(self, i: int, j: int, state: IntArray) -> list[Pair]:
        """Merge j into i, whose state s implies state[s] of j."""
        if not len(state):
            raise Exhausted
        self.costs[i] = self.costs[i] + self.costs[j][state] + self._take(i, j)[np.arange(len(state)), state]
        self.uses[i] += tuple(Use(use.lo, use.hi, use.amount[state]) for use in self.uses[j])
        self.uses[j] = ()
        moved = sorted(self.adjacent[j])
        for other in moved:
            add_edge(self.edges, i, other, self._take(j, other)[state])
            self.adjacent[i].add(other)
            self.adjacent[other].add(i)
        self.merged.append((i, j, state))
        return [(min(i, other), max(i, other)) for other in moved]

    def finish(self) -> tuple[Model, Undo]:
        """The merged model and the map back; the original object if nothing was merged."""
        if not self.merged:
            return self.model, lambda choices: choices
        uses = [_sum_uses(uses) if len(uses) > 1 else uses for uses in self.uses]
        merged = replace(self.model, costs=self.costs, edges=self.edges, uses=uses)
        smaller, left = drop_nodes(merged, {j for _, j, _ in self.merged})
        count, history = len(self.model), self.merged

        def undo(choices: IntArray) -> IntArray:
            old = np.zeros(count, dtype=np.int64)
            old[left] = choices
            for i, j, state in reversed(history):
                old[j] = state[old[i]]
            return old

        return smaller, undo

    def _take(self, i: int, j: int) -> FloatArray:
        """Remove an edge and return its table, with the states of `i` as rows."""
        self.adjacent[i].discard(j)
        self.adjacent[j].discard(i)
        return self.edges.pop((i, j)) if i < j else self.edges.pop((j, i)).T


def _sum_uses(uses: tuple[Use, ...]) -> tuple[Use, ...]:
    """The uses, with those over the same rows summed."""
    amounts: dict[Pair, FloatArray] = {}
    for use in uses:
        rows = (use.lo, use.hi)
        amounts[rows] = amounts[rows] + use.amount if rows in amounts else use.amount
    return tuple(Use(lo, hi, amount) for (lo, hi), amount in amounts.items())
