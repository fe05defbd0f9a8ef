"""A node that a neighbour's state determines is merged into that neighbour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..model import Model, Pair, Undo, Use, add_edge, drop_nodes
from ..problem import FloatArray, IntArray


class MergeDetermined:
    """Where each state of i allows one state f(x_i) of j, j's costs, memory and edges move to i."""

    name = "merge nodes that a neighbour determines"

    def apply(self, model: Model) -> tuple[Model, Undo]:
        """The model without the nodes that are a function of another."""
        work = _Merger(model)
        queue = list(model.edges)
        while queue:
            queue = [pair for key in queue if key in work.edges for pair in work.try_merge(key)]
        if not work.merged:
            return model, lambda choices: choices
        merged = replace(model, costs=work.costs, edges=work.edges, uses=work.uses)
        smaller, left = drop_nodes(merged, {j for j, _, _ in work.merged})

        def undo(choices: IntArray) -> IntArray:
            old = np.zeros(len(model), dtype=np.int64)
            old[left] = choices
            for j, i, function in reversed(work.merged):
                old[j] = function[old[i]]
            return old

        return smaller, undo


class _Merger:
    """The tables while nodes are merged, and the list of (merged node, its keeper, function)."""

    def __init__(self, model: Model) -> None:
        self.costs, self.edges, self.uses = list(model.costs), dict(model.edges), list(model.uses)
        self.adjacent = [set(neighbours) for neighbours in model.neighbours()]
        self.merged: list[tuple[int, int, IntArray]] = []

    def try_merge(self, key: Pair) -> list[Pair]:
        """Merge the two nodes of an edge if one determines the other; the edges that changed by it."""
        i, j = key
        finite = np.isfinite(self.edges[key])
        if (finite.sum(axis=1) == 1).all():
            return self._merge(i, j, finite.argmax(axis=1))
        if (finite.sum(axis=0) == 1).all():
            return self._merge(j, i, finite.argmax(axis=0))
        return []

    def _merge(self, i: int, j: int, function: IntArray) -> list[Pair]:
        """Move node j, in state function[x_i], into node i."""
        own = self._take(i, j)
        self.costs[i] = self.costs[i] + self.costs[j][function] + own[np.arange(len(function)), function]
        self.uses[i] = _add_uses(self.uses[i], tuple(Use(u.lo, u.hi, u.amount[function]) for u in self.uses[j]))
        self.uses[j] = ()
        changed = []
        for other in sorted(self.adjacent[j]):
            table = self._take(j, other)[function]
            add_edge(self.edges, i, other, table)
            self.adjacent[i].add(other)
            self.adjacent[other].add(i)
            changed.append((min(i, other), max(i, other)))
        self.merged.append((j, i, function))
        return changed

    def _take(self, i: int, j: int) -> FloatArray:
        """Remove an edge; its table with the states of `i` as rows."""
        self.adjacent[i].discard(j)
        self.adjacent[j].discard(i)
        return self.edges.pop((i, j)) if i < j else self.edges.pop((j, i)).T


def _add_uses(first: tuple[Use, ...], second: tuple[Use, ...]) -> tuple[Use, ...]:
    """Both lists of uses, those over the same rows summed."""
    amounts: dict[Pair, FloatArray] = {}
    for use in (*first, *second):
        rows = (use.lo, use.hi)
        amounts[rows] = amounts[rows] + use.amount if rows in amounts else use.amount
    return tuple(Use(lo, hi, amount) for (lo, hi), amount in amounts.items())
