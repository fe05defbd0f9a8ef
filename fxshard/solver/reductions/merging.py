"""Merge two neighbouring nodes into one whose states are the pairs that their edge allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Pair, Undo, add_edge, drop_nodes
from fxshard.solver.problem.row_uses import Use


class MergeDetermined:
    """Where each state of i allows a single state f(x_i) of j, moves the costs, uses and edges of j to i."""

    name = "merge nodes that a neighbour determines"

    def apply(self, model: Model) -> tuple[Model, Undo]:
        """The model without the nodes that are a function of another."""
        work = Merger(model)
        queue = list(model.edges)
        while queue:
            queue = [pair for key in queue if key in work.edges for pair in _merge_determined(work, key)]
        return work.finish()


@dataclass(frozen=True)
class Contract:
    """Merges neighbours that allow few pairs of states, in order of least table growth.

    Merges remove cycles of the graph and so tighten the bound of message passing; once pruning has forbidden most pairs, merging leaves
    little to search. pairs: the most states of a merged node. entries: the most entries of all tables together.
    """

    pairs: int
    entries: int
    name: str = "merge neighbours that allow few pairs"

    def apply(self, model: Model) -> tuple[Model, Undo]:
        """The model of fewer, larger nodes."""
        work = Merger(model)
        total = model.entries
        heap = [(*work.growth(key), key) for key in work.edges]
        heapify(heap)
        while heap:
            growth, pairs, key = heappop(heap)
            if key not in work.edges:
                continue
            if (growth, pairs) != work.growth(key):
                heappush(heap, (*work.growth(key), key))
            elif pairs <= self.pairs and (growth <= 0 or total + growth <= self.entries):
                total += growth
                changed = work.merge(*key, *np.nonzero(np.isfinite(work.edges[key])))
                for pair in changed:
                    heappush(heap, (*work.growth(pair), pair))
        return work.finish()


class Merger:
    """The tables during merging, and the merges so far: (kept node, its old states, removed node, its old states)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.costs, self.edges, self.uses = list(model.costs), dict(model.edges), list(model.uses)
        self.adjacent = [set(neighbours) for neighbours in model.neighbours()]
        self.merged: list[tuple[int, IntArray, int, IntArray]] = []
        self._allowed: dict[Pair, tuple[FloatArray, int]] = {}

    def merge(self, i: int, j: int, a: IntArray, b: IntArray) -> list[Pair]:
        """Merge j into i, whose state s then means (a[s], b[s]); returns the edges that changed."""
        if not len(a):
            raise Exhausted
        own = self._take(i, j)
        self.costs[i] = self.costs[i][a] + self.costs[j][b] + own[a, b]
        identity = len(a) == len(own) and bool((a == np.arange(len(a))).all())
        self.uses[i] = (self.uses[i] if identity else _pick(self.uses[i], a)) + _pick(self.uses[j], b)
        self.uses[j] = ()
        if not identity:
            for other in sorted(self.adjacent[i]):
                key = (i, other) if i < other else (other, i)
                self.edges[key] = self.edges[key][a] if i < other else self.edges[key][:, a]
        moved = sorted(self.adjacent[j])
        for other in moved:
            add_edge(self.edges, i, other, self._take(j, other)[b])
            self.adjacent[i].add(other)
            self.adjacent[other].add(i)
        self.merged.append((i, a, j, b))
        return [(min(i, other), max(i, other)) for other in (moved if identity else sorted(self.adjacent[i]))]

    def growth(self, key: Pair) -> tuple[int, int]:
        """The number of table entries that merging an edge would add, and the number of states of the merged node."""
        i, j = key
        pairs = self._pairs(key)
        size = [len(cost) for cost in (self.costs[i], self.costs[j])]
        around = [sum(len(self.costs[n]) for n in self.adjacent[node]) for node in key]
        both = sum(len(self.costs[n]) for n in (self.adjacent[i] | self.adjacent[j]) - {i, j})
        return pairs * both - size[0] * around[0] - size[1] * around[1] + size[0] * size[1], pairs

    def finish(self) -> tuple[Model, Undo]:
        """The merged model and the map back; the original object if nothing was merged."""
        if not self.merged:
            return self.model, lambda choices: choices
        uses = [_sum_uses(uses) if len(uses) > 1 else uses for uses in self.uses]
        merged = replace(self.model, costs=self.costs, edges=self.edges, uses=uses)
        smaller, left = drop_nodes(merged, {j for _, _, j, _ in self.merged})
        count, history = len(self.model), self.merged

        def undo(choices: IntArray) -> IntArray:
            old = np.zeros(count, dtype=np.int64)
            old[left] = choices
            for i, a, j, b in reversed(history):
                old[i], old[j] = a[old[i]], b[old[i]]
            return old

        return smaller, undo

    def _pairs(self, key: Pair) -> int:
        table = self.edges[key]
        known = self._allowed.get(key)
        if known is None or known[0] is not table:
            known = self._allowed[key] = (table, int(np.isfinite(table).sum()))
        return known[1]

    def _take(self, i: int, j: int) -> FloatArray:
        """Remove an edge and return its table, with the states of `i` as rows."""
        self.adjacent[i].discard(j)
        self.adjacent[j].discard(i)
        return self.edges.pop((i, j)) if i < j else self.edges.pop((j, i)).T


def _merge_determined(work: Merger, key: Pair) -> list[Pair]:
    """Merge the nodes of an edge if one determines the other; returns the edges that changed."""
    i, j = key
    finite = np.isfinite(work.edges[key])
    forward, backward = bool((finite.sum(axis=1) == 1).all()), bool((finite.sum(axis=0) == 1).all())
    if forward and backward:  # keep the node with more uses and edges
        backward = len(work.uses[j]) + len(work.adjacent[j]) > len(work.uses[i]) + len(work.adjacent[i])
    if backward:
        return work.merge(j, i, np.arange(finite.shape[1]), finite.argmax(axis=0))
    if forward:
        return work.merge(i, j, np.arange(finite.shape[0]), finite.argmax(axis=1))
    return []


def _pick(uses: tuple[Use, ...], states: IntArray) -> tuple[Use, ...]:
    return tuple(Use(use.lo, use.hi, use.amount[states]) for use in uses)


def _sum_uses(uses: tuple[Use, ...]) -> tuple[Use, ...]:
    """The uses, with those over the same rows summed."""
    amounts: dict[Pair, FloatArray] = {}
    for use in uses:
        rows = (use.lo, use.hi)
        amounts[rows] = amounts[rows] + use.amount if rows in amounts else use.amount
    return tuple(Use(lo, hi, amount) for (lo, hi), amount in amounts.items())
