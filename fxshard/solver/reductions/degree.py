"""Eliminate nodes that use no row and have at most two neighbours."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Pair, Undo, add_edge, drop_nodes

Eliminated = tuple[int, FloatArray, list[tuple[int, FloatArray]]]

MAX_TABLE = 10_000_000


class EliminateSmallDegree:
    """The reductions R0, R1 and R2 of PBQP (Scholz and Eckstein 2002), repeated until none applies."""

    name = "eliminate nodes of degree 0, 1 and 2"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The model of the nodes with at least three neighbours, or with uses of rows."""
        work = _Eliminator(model)
        work.run(budget)
        if not work.gone:
            return model, lambda choices: choices
        shrunk = replace(model, costs=work.costs, edges=work.edges, constant=work.constant)
        smaller, left = drop_nodes(shrunk, {node for node, _, _ in work.gone})

        def undo(choices: IntArray) -> IntArray:
            old = np.zeros(len(model), dtype=np.int64)
            old[left] = choices
            for node, cost, tables in reversed(work.gone):
                old[node] = int(sum((table[:, old[other]] for other, table in tables), cost).argmin())
            return old

        return smaller, undo


class _Eliminator:
    """The tables during elimination, and the eliminated nodes (node, its costs, its edges) in order."""

    def __init__(self, model: Model) -> None:
        self.costs, self.edges, self.constant = list(model.costs), dict(model.edges), model.constant
        self.adjacent = [set(neighbours) for neighbours in model.neighbours()]
        self.free = [not uses for uses in model.uses]
        self.gone: list[Eliminated] = []

    def run(self, budget: Budget) -> None:
        queue = deque(n for n in range(len(self.costs)) if self.free[n] and len(self.adjacent[n]) <= 2)
        while queue and not budget.late:
            node = queue.popleft()
            if not self.free[node] or not self._fits(node):
                continue
            self.free[node] = False
            others = sorted(self.adjacent[node])
            self._eliminate(node, others)
            queue.extend(n for n in others if self.free[n] and len(self.adjacent[n]) <= 2)

    def _fits(self, node: int) -> bool:
        size = len(self.costs[node])
        for other in self.adjacent[node]:
            size *= len(self.costs[other])
        return size <= MAX_TABLE

    def _eliminate(self, node: int, others: list[int]) -> None:
        cost = self.costs[node]
        tables = [(other, self._take(node, other)) for other in others]
        self.gone.append((node, cost, tables))
        if not others:
            self.constant += float(cost.min(initial=np.inf))
            if np.isinf(self.constant):
                raise Exhausted
        elif len(others) == 1:
            other, table = tables[0]
            self.costs[other] = self.costs[other] + (cost[:, None] + table).min(axis=0)
        else:
            (a, first), (b, second) = tables
            add_edge(self.edges, a, b, min_plus(first.T + cost, second))
            self.adjacent[a].add(b)
            self.adjacent[b].add(a)

    def _take(self, i: int, j: int) -> FloatArray:
        self.adjacent[i].discard(j)
        self.adjacent[j].discard(i)
        key: Pair = (i, j) if i < j else (j, i)
        table = self.edges.pop(key)
        return table if i < j else table.T


def min_plus(first: FloatArray, second: FloatArray) -> FloatArray:
    """The table (a, b) of min_k first[a, k] + second[k, b], without a three-dimensional temporary."""
    result = first[:, :1] + second[:1]
    for k in range(1, second.shape[0]):
        np.minimum(result, first[:, k : k + 1] + second[k], out=result)
    return result
