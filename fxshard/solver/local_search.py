"""Plans: a greedy one to begin with, repair of memory, and polish by the best single change."""

from __future__ import annotations

import numpy as np

from .arrays import BoolArray, FloatArray, IntArray, starts
from .budget import Budget
from .model import Model
from .moves import best_move, cheapest_relief

MAX_MOVES = 20_000
PATIENCE = 30
"""Moves of a repair that may pass without the rows together being exceeded by less than before."""


def greedy(model: Model) -> IntArray | None:
    """Choices in node order, each the cheapest given those before that leaves every later neighbour a state.

    Every reader of a value is taken to pay for itself.
    """
    local = [cost.copy() for cost in model.costs]
    neighbours = model.neighbours()
    readings: list[list[tuple[int, FloatArray]]] = [[] for _ in model.costs]
    for transfer in model.transfers:
        for reader, want in transfer.readers:
            table = transfer.prices[np.ix_(transfer.have, want)]
            first = reader > transfer.source
            readings[min(reader, transfer.source)].append((max(reader, transfer.source), table if first else table.T))
    choices = np.zeros(len(model), dtype=np.int64)
    for node in range(len(model)):
        later = [(other, model.table(node, other)) for other in neighbours[node] if other > node] + readings[node]
        cost = local[node]
        for other, table in later:
            cost = cost + (table + local[other]).min(axis=1, initial=np.inf)
        if not len(cost) or np.isinf(cost.min()):
            return None
        choices[node] = cost.argmin()
        for other, table in later:
            local[other] = local[other] + table[choices[node]]
    return choices


class Polish:
    """A plan and the cost of every state given all other choices, kept up to date move by move.

    room: (rows,) what each row has left, `inf` where its limit may be exceeded.
    """

    def __init__(self, model: Model, choices: IntArray, budget: Budget) -> None:
        self.model, self.choices, self.budget = model, choices.copy(), budget
        self._uses = model.use_table.flat
        self.offset = starts([len(cost) for cost in model.costs])
        self.node = np.repeat(np.arange(len(model)), np.diff(self.offset))
        self._base = np.concatenate([*model.costs, np.zeros(0)])
        self.neighbours = model.neighbours()
        for (i, j), table in model.edges.items():
            self._own(i)[:] += table[:, choices[j]]
            self._own(j)[:] += table[choices[i]]
        self.local = np.empty_like(self._base)
        self._renew(np.arange(len(model)))
        self.room = np.where(np.isinf(model.slopes), model.limits - model.usage(choices), np.inf)

    def run(self) -> IntArray | None:
        """The plan after repair and polish, None where memory could not be made to fit."""
        if not self.repair():
            return None
        self.improve()
        return self.choices

    def improve(self) -> None:
        """Take the best single change that still fits, until there is none."""
        witness = np.full(len(self.local), -1)
        blocked = np.zeros(len(self.local), dtype=bool)
        for _ in range(MAX_MOVES):
            if self.model.moving.empty:
                position = best_move(self.local, self.offset, self.choices, self._uses, self.room, witness)
            else:
                position = self._best_move(blocked)
            self.budget.charge(len(self.local))
            if position < 0 or self.budget.spent:
                return
            self._move(*self._where(position))

    def repair(self) -> bool:
        """Lower the fullest row at the least cost per byte until every row fits, or until that gets nowhere."""
        best, since = np.inf, 0
        for _ in range(MAX_MOVES):
            if not len(self.room) or self.room.min() >= 0:
                return True
            over = -float((np.minimum(self.room, 0.0) / np.maximum(np.abs(self.model.limits), 1.0)).sum())
            best, since = (over, 0) if over < best else (best, since + 1)
            if since > PATIENCE:
                return False
            self.budget.charge(len(self.local))
            row = int(self.room.argmin())
            freed = self._freed(row)
            position = cheapest_relief(row, -self.room[row], self.local, self.offset, self.choices, self._uses, freed)
            if position < 0 or self.budget.spent:
                return False
            self._move(*self._where(position))
        return False

    def _best_move(self, blocked: BoolArray) -> int:
        """As `best_move`, where transfers count too. blocked: (states,) changes that did not fit since the room last changed; renewed."""
        change = np.where(blocked, np.inf, self.local - self.local[self.offset[:-1] + self.choices][self.node])
        while len(change) and change[position := int(change.argmin())] < 0:
            node, state = self._where(position)
            room = self._room_after(node, state)
            if room is None:
                return position
            if room.min() >= 0:
                blocked[:] = False
                return position
            blocked[position], change[position] = True, np.inf
        return -1

    def _freed(self, row: int) -> FloatArray:
        """What changing to each state would take out of a row through transfers, (states,), or (0,) where none counts."""
        if self.model.moving.empty:
            return np.zeros(0)
        local = self.model.moving.local(row, self.choices, self.offset)
        return local[self.offset[:-1] + self.choices][self.node] - local

    def _room_after(self, node: int, state: int) -> FloatArray | None:
        """The room of each row once a node takes another state, None where that changes nothing."""
        moved = self.model.moving.change(node, state, self.choices, len(self.room))
        if not self.model.uses[node] and moved is None:
            return None
        room = self.room.copy() if moved is None else self.room - moved
        for use in self.model.uses[node]:
            room[use.lo : use.hi] -= use.amount[state] - use.amount[self.choices[node]]
        return room

    def _where(self, position: int) -> tuple[int, int]:
        node = int(self.node[position])
        return node, position - int(self.offset[node])

    def _move(self, node: int, state: int) -> None:
        room = self._room_after(node, state)
        self.room = self.room if room is None else room
        old, self.choices[node] = int(self.choices[node]), state
        for other in self.neighbours[node]:
            table = self.model.table(other, node)
            if np.isinf(table[:, old]).any():
                self._sum(other)
            else:
                self._own(other)[:] += table[:, state] - table[:, old]
        self._renew(np.concatenate([np.asarray(self.neighbours[node], dtype=np.int64), self.model.transfers.near(node)]))

    def _renew(self, nodes: IntArray) -> None:
        self.model.transfers.add(nodes, self.choices, self.offset, self._base, self.local)

    def _sum(self, node: int) -> None:
        """Sum a node's costs without transfers anew: a forbidden pair cannot be subtracted."""
        cost = self.model.costs[node].copy()
        for other in self.neighbours[node]:
            cost += self.model.table(node, other)[:, self.choices[other]]
        self._own(node)[:] = cost

    def _own(self, node: int) -> FloatArray:
        return self._base[self.offset[node] : self.offset[node + 1]]
