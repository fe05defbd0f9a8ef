"""Values with several readers: a redistribution to a layout is paid once, however many nodes read the value in it.

A transfer says which layout each state of the source gives and which layout each state of a reader wants. Its cost is

    T(x) = sum over the distinct layouts l that the readers want of prices[h, l],    h the layout that the source gives.

A *split* distributes the prices over the readers, split_1 + split_2 + ... = prices with all parts non-negative. It bounds the cost from
below by pairwise costs, sum_r split_r[h, l_r] <= T, which is the form that message passing needs (`links.Splits`). The best split attains
the bound of the linear relaxation with one variable per (h, l), "h is redistributed to l", at least the marginal of (h, l) at each reader.
That is much tighter than the relaxation with a variable "a copy in l exists", which ignores h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fxshard.compiled import compiled
from fxshard.solver.problem.arrays import BoolArray, FloatArray, IntArray, starts


@dataclass(frozen=True)
class Transfer:
    """Redistribution of one value. have: (k_source,) layout per state; readers: (node, want), want (k_node,) layout per state;
    prices: (given, wanted) cost, >= 0 or `inf`. A reader is not the source; a node may read twice."""

    source: int
    have: IntArray
    readers: tuple[tuple[int, IntArray], ...]
    prices: FloatArray

    def cost(self, choices: Sequence[int] | IntArray) -> float:
        """T(x)."""
        return self.sum(self.prices, choices)

    def sum(self, table: FloatArray, choices: Sequence[int] | IntArray) -> float:
        """The sum of a table (given, wanted) over the distinct layouts that the readers want."""
        wanted = sorted({int(want[choices[node]]) for node, want in self.readers})
        row = table[self.have[choices[self.source]]]
        return sum(float(row[layout]) for layout in wanted)

    def keep(self, states: Sequence[IntArray | None]) -> Transfer:
        """The transfer with only some states per node (None keeps all)."""
        own = states[self.source]
        have = self.have if own is None else self.have[own]
        readers = tuple((n, want if (kept := states[n]) is None else want[kept]) for n, want in self.readers)
        return replace(self, have=have, readers=readers)

    def nodes(self) -> list[int]:
        """The source and the readers, each once."""
        return list(dict.fromkeys([self.source, *(node for node, _ in self.readers)]))

    @property
    def entries(self) -> int:
        """Entries of the prices, counted once per reader."""
        return len(self.readers) * self.prices.size


class Flat(NamedTuple):
    """T transfers with R readers in all, as flat arrays."""

    source: IntArray  # (T,)
    have: IntArray  # layouts of all sources' states, transfer by transfer
    have_start: IntArray  # (T + 1,)
    prices: FloatArray  # all tables of prices, row by row
    price_start: IntArray  # (T,) where each transfer's prices begin
    width: IntArray  # (T,) layouts
    first: IntArray  # (T + 1,) where in `reader` each one's readers begin
    reader: IntArray  # (R,) nodes
    want: IntArray  # layouts of all readers' states, reader by reader
    want_start: IntArray  # (R + 1,)
    touched_first: IntArray  # (nodes + 1,) where in `touched` the transfers of each node begin
    touched: IntArray


class Transfers(tuple[Transfer, ...]):
    """The transfers of a model."""

    @cached_property
    def flat(self) -> Flat:
        """The transfers as flat arrays, computed once."""
        readers = [reader for transfer in self for reader in transfer.readers]
        tables = {id(t.prices): t.prices for t in self}  # repeated layers share arrays: each is stored once
        place = dict(zip(tables, starts([t.size for t in tables.values()]), strict=False))
        touching = sorted((node, index) for index, transfer in enumerate(self) for node in transfer.nodes())
        nodes = np.asarray([node for node, _ in touching], dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        return Flat(
            np.asarray([t.source for t in self], dtype=np.int64),
            np.concatenate([*(t.have for t in self), none]).astype(np.int64),
            starts([len(t.have) for t in self]),
            np.concatenate([*(t.ravel() for t in tables.values()), np.zeros(0)]),
            np.asarray([place[id(t.prices)] for t in self], dtype=np.int64),
            np.asarray([t.prices.shape[1] for t in self], dtype=np.int64),
            starts([len(t.readers) for t in self]),
            np.asarray([node for node, _ in readers], dtype=np.int64),
            np.concatenate([*(want for _, want in readers), none]).astype(np.int64),
            starts([len(want) for _, want in readers]),
            starts(np.bincount(nodes)),
            np.asarray([index for _, index in touching], dtype=np.int64),
        )

    def cost(self, choices: IntArray) -> float:
        """The sum of T(x) over all."""
        return _cost(self.flat, choices) if self else 0.0

    def near(self, node: int) -> IntArray:
        """The nodes whose costs may change when this one changes, perhaps with repeats."""
        return _near(self.flat, node) if self else np.zeros(0, dtype=np.int64)

    def add(self, nodes: IntArray, choices: IntArray, offset: IntArray, base: FloatArray, local: FloatArray) -> None:
        """Sets local to base + T per state of `nodes`, all other nodes as chosen; arrays (states,), each node's states at its offset."""
        if self:
            add(self.flat, np.ones(len(self), dtype=np.bool_), nodes, choices, offset, base, local)
        else:
            for node in nodes:
                local[offset[node] : offset[node + 1]] = base[offset[node] : offset[node + 1]]


@compiled
def paid(flat: Flat, transfer: int, choices: IntArray) -> float:
    """The cost of one transfer."""
    row = flat.price_start[transfer] + flat.have[flat.have_start[transfer] + choices[flat.source[transfer]]] * flat.width[transfer]
    total, there = 0.0, np.zeros(flat.width[transfer], dtype=np.bool_)
    for r in range(flat.first[transfer], flat.first[transfer + 1]):
        layout = flat.want[flat.want_start[r] + choices[flat.reader[r]]]
        if not there[layout]:
            there[layout] = True
            total += flat.prices[row + layout]
    return total


@compiled
def _cost(flat: Flat, choices: IntArray) -> float:
    total = 0.0
    for transfer in range(len(flat.source)):
        total += paid(flat, transfer, choices)
    return total


@compiled
def _near(flat: Flat, node: int) -> IntArray:
    begin, end = (0, 0) if node + 1 >= len(flat.touched_first) else (flat.touched_first[node], flat.touched_first[node + 1])
    count = 0
    for k in range(begin, end):
        count += 1 + flat.first[flat.touched[k] + 1] - flat.first[flat.touched[k]]
    nodes = np.empty(count, dtype=np.int64)
    count = 0
    for k in range(begin, end):
        t = flat.touched[k]
        nodes[count] = flat.source[t]
        count += 1
        for r in range(flat.first[t], flat.first[t + 1]):
            nodes[count] = flat.reader[r]
            count += 1
    return nodes


@compiled
def add(flat: Flat, active: BoolArray, nodes: IntArray, choices: IntArray, offset: IntArray, base: FloatArray, local: FloatArray) -> None:
    """As `Transfers.add`, for the transfers marked in active (T,)."""
    for node in nodes:
        low, high = offset[node], offset[node + 1]
        for state in range(low, high):  # numba takes seconds to compile the shape check of a slice assignment
            local[state] = base[state]
        if node + 1 >= len(flat.touched_first):
            continue
        for k in range(flat.touched_first[node], flat.touched_first[node + 1]):
            t = flat.touched[k]
            if not active[t]:
                continue
            width, prices = flat.width[t], flat.price_start[t]
            wanted = np.zeros(width, dtype=np.bool_)  # by readers other than `node`
            for r in range(flat.first[t], flat.first[t + 1]):
                if flat.reader[r] != node:
                    wanted[flat.want[flat.want_start[r] + choices[flat.reader[r]]]] = True
            if flat.source[t] == node:
                for state in range(low, high):
                    row = prices + flat.have[flat.have_start[t] + state - low] * width
                    for layout in range(width):
                        if wanted[layout]:
                            local[state] += flat.prices[row + layout]
                continue
            row = prices + flat.have[flat.have_start[t] + choices[flat.source[t]]] * width
            total = 0.0
            for layout in range(width):
                if wanted[layout]:
                    total += flat.prices[row + layout]
            for state in range(low, high):
                local[state] += total
                for r in range(flat.first[t], flat.first[t + 1]):
                    if flat.reader[r] == node:
                        layout = flat.want[flat.want_start[r] + state - low]
                        repeated = wanted[layout]
                        for earlier in range(flat.first[t], r):
                            if flat.reader[earlier] == node and flat.want[flat.want_start[earlier] + state - low] == layout:
                                repeated = True
                        if not repeated:
                            local[state] += flat.prices[row + layout]
