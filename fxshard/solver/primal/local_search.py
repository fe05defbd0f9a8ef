"""Greedy construction of a plan, repair of exceeded rows, and improvement by the best single change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fxshard.solver.primal.local_search_kernels import best_move, cheapest_relief, in_row, move
from fxshard.solver.problem.arrays import FloatArray, IntArray, remembered, starts
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model

MAX_MOVES = 20_000
PATIENCE = 30
"""Moves of a repair without progress (a new least total overrun) after which it gives up."""


def greedy(model: Model) -> IntArray | None:
    """Choices in node order, each the cheapest given the earlier ones that leaves every later neighbour an allowed state.

    Each reader of a value counts its transfer separately. None where the greedy choice fails.
    """
    local = list(model.costs)
    neighbours = model.neighbours()
    turned: Callable[..., FloatArray] = remembered(np.transpose)  # repeated layers share the arrays read and made here
    cheapest: Callable[..., FloatArray] = remembered(lambda table, other: (table + other).min(axis=1, initial=np.inf))
    added: Callable[..., FloatArray] = remembered(np.add)
    given: Callable[..., FloatArray] = remembered(lambda cost, table, choice: cost + table[choice])
    chosen: Callable[..., int] = remembered(lambda cost: -1 if not len(cost) or np.isinf(cost.min()) else int(cost.argmin()))
    readings: list[list[tuple[int, FloatArray]]] = [[] for _ in model.costs]
    tables: dict[tuple[int, bytes, bytes], FloatArray] = {}
    for transfer in model.transfers:
        have = transfer.have.tobytes()
        for reader, want in transfer.readers:
            key = id(transfer.prices), have, want.tobytes()
            if key not in tables:
                tables[key] = transfer.prices[np.ix_(transfer.have, want)]
            table, first = tables[key], reader > transfer.source
            readings[min(reader, transfer.source)].append((max(reader, transfer.source), table if first else turned(table)))
    choices = np.zeros(len(model), dtype=np.int64)
    for node in range(len(model)):
        later = [(other, model.table(node, other)) for other in neighbours[node] if other > node] + readings[node]
        cost = local[node]
        for other, table in later:
            cost = added(cost, cheapest(table, local[other]))
        choices[node] = choice = chosen(cost)
        if choice < 0:
            return None
        for other, table in later:
            local[other] = given(local[other], table, choice)
    return choices


class Polish:
    """Local search on a plan, with the cost of every state given all other choices updated after each move.

    room: (rows,) how much each row has left, `inf` for soft limits.
    """

    def __init__(self, model: Model, choices: IntArray, budget: Budget) -> None:
        self.model, self.choices, self.budget = model, choices.copy(), budget
        self._uses, self._moved = model.use_table.flat, model.moving.flat
        self.offset = starts([len(cost) for cost in model.costs])
        self.node = np.repeat(np.arange(len(model)), np.diff(self.offset))
        self._base = np.concatenate([*model.costs, np.zeros(0)])
        self.neighbours = model.neighbours()
        for (i, j), table in model.edges.items():
            self._own(self._base, i)[:] += table[:, choices[j]]
            self._own(self._base, j)[:] += table[choices[i]]
        self.local = np.empty_like(self._base)
        self._renew(np.arange(len(model)))
        self.room = np.where(np.isinf(model.slopes), model.limits - model.usage(choices), np.inf)

    def run(self) -> IntArray | None:
        """The plan after repair and improvement, None where repair failed."""
        if not self.repair():
            return None
        self.improve()
        return self.choices

    def improve(self) -> None:
        """Apply the best single change that fits, until none saves cost."""
        witness, seen = np.full(len(self.local), -1), np.zeros(len(self.local))
        for _ in range(MAX_MOVES):
            position = best_move(self.local, self.offset, self.choices, self._uses, self._moved, self.room, witness, seen)
            self.budget.charge(len(self.local))
            if position < 0 or self.budget.spent:
                return
            for node in self._move(*self._where(position)):
                self._own(witness, node)[:] = -1

    def repair(self) -> bool:
        """Lower the fullest row at the least cost per byte until it fits, then the next; whether all rows fit in the end."""
        best, since, row = np.inf, 0, -1
        own = used = np.zeros(0)
        for _ in range(MAX_MOVES):
            if not len(self.room) or self.room.min() >= 0:
                return True
            over = -float((np.minimum(self.room, 0.0) / np.maximum(np.abs(self.model.limits), 1.0)).sum())
            best, since = (over, 0) if over < best else (best, since + 1)
            if since > PATIENCE:
                return False
            self.budget.charge(len(self.local))
            if row < 0 or self.room[row] >= 0:
                row = int(self.room.argmin())
                own = in_row(row, self.offset, self._uses)
                used = own.copy()
                self.model.moving.local(row, np.arange(len(self.choices)), self.choices, self.offset, own, used)
            position = cheapest_relief(-self.room[row], self.local, self.offset, self.choices, used)
            if position < 0 or self.budget.spent:
                return False
            near = self._move(*self._where(position))
            self.model.moving.local(row, near, self.choices, self.offset, own, used)
        return False

    def _where(self, position: int) -> tuple[int, int]:
        node = int(self.node[position])
        return node, position - int(self.offset[node])

    def _move(self, node: int, state: int) -> IntArray:
        """Change a node's choice; returns the nodes whose states' costs or uses may have changed, perhaps with repeats."""
        old = int(self.choices[node])
        move(node, state, self.choices, self._uses, self._moved, self.room)
        for other in self.neighbours[node]:
            table = self.model.table(other, node)
            if np.isinf(table[:, old]).any():
                self._sum(other)
            else:
                self._own(self._base, other)[:] += table[:, state] - table[:, old]
        near = self.model.transfers.near(node)
        self._renew(np.concatenate([np.asarray(self.neighbours[node], dtype=np.int64), near]))
        return np.append(near, node)

    def _renew(self, nodes: IntArray) -> None:
        self.model.transfers.add(nodes, self.choices, self.offset, self._base, self.local)

    def _sum(self, node: int) -> None:
        """Recompute a node's costs without transfers: the `inf` of a forbidden pair cannot be subtracted."""
        cost = self.model.costs[node].copy()
        for other in self.neighbours[node]:
            cost += self.model.table(node, other)[:, self.choices[other]]
        self._own(self._base, node)[:] = cost

    def _own(self, values: FloatArray | IntArray, node: int) -> FloatArray | IntArray:
        return values[self.offset[node] : self.offset[node + 1]]
