"""A region of a model as a separate model, with the rest bounded by message passing.

After message passing a model is the sum of a constant, node slacks, link slacks and the surcharges of shared prices, all but the constant
nonnegative (`sweeps.Sweeper.slacks`). So everything outside a *region* of nodes can be dropped:

    E(x) >= constant + sum_i kept_i[x_i] + sum_ij kept_ij[x_i, x_j] + surcharges      i, j and readers inside.

Messages between nodes of the region are undone, which restores their original costs. If a value made inside is read on both sides, the
readers outside keep their splits of its prices. Where the messages were tight, the bound of a region is close to that of the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.links import Link
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.model import Model, Pair
from fxshard.solver.problem.transfers import Transfer, Transfers


class Reparametrised:
    """A snapshot of a reparameterised model, independent of later messages."""

    def __init__(self, ascent: Ascent) -> None:
        sweeper = ascent.sweeper
        self._link_least, kept = sweeper.least_slacks()
        self.model, self.links, self.offset = ascent.model, sweeper.links, sweeper.offset
        _, self._weights, *self._messages, self._splits, _ = sweeper.state()
        self._share = 1.0 / sweeper.chains
        self._table_start, self._message_start = sweeper.splits.start, sweeper.wiring.message
        self._kept = kept
        self._node_least = np.minimum.reduceat(kept, self.offset[:-1])
        self.constant = self.model.constant - ascent.memory.allowance(ascent.multipliers)
        self.bound = self.constant + float(self._node_least.sum() + self._link_least.sum())

    @cached_property
    def _around(self) -> list[list[int]]:
        """Per node the indexes of its links."""
        around: list[list[int]] = [[] for _ in self.model.costs]
        for number, link in enumerate(self.links):
            around[link.i].append(number)
            around[link.j].append(number)
        return around

    def near(self, nodes: Iterable[int], count: int) -> IntArray:
        """Some nodes and those nearest to them along links, about `count` in all, ascending."""
        found = dict.fromkeys(nodes)
        queue = deque(found)
        while queue and len(found) < count:
            node = queue.popleft()
            for number in self._around[node]:
                other = self.links[number].i + self.links[number].j - node
                if other not in found:
                    found[other] = None
                    queue.append(other)
        return np.asarray(sorted(found), dtype=np.int64)

    def region(self, nodes: IntArray) -> Model:
        """The model of some nodes (ascending), whose optimum bounds the whole from below; rows are priced by their multipliers."""
        new = {int(node): index for index, node in enumerate(nodes)}
        touched = sorted({number for node in new for number in self._around[node]})
        inside = [k for k in touched if self.links[k].i in new and self.links[k].j in new]
        costs = [self._own(self._kept, node).copy() for node in nodes]
        edges: dict[Pair, FloatArray] = {}
        for number in inside:
            link = self.links[number]
            i, j = new[link.i], new[link.j]
            self._take_back(number, costs[i], costs[j])
            if link.transfer < 0:
                edges[i, j] = self._split(number)
        outside = float(np.delete(self._node_least, nodes).sum() + np.delete(self._link_least, inside).sum())
        transfers = self._transfers(new, touched)
        plain = replace(self.model, costs=costs, edges=edges, uses=[()] * len(nodes), limits=np.zeros(0), prices=np.zeros(0))
        return replace(plain, transfers=transfers, constant=self.constant + outside, cutoff=np.inf)

    def surrounded(self, nodes: IntArray, plan: IntArray) -> tuple[Model, IntArray]:
        """The model of some nodes with all others fixed to a plan (up to a constant), and the original indexes of its nodes.

        It contains these nodes, and those that share a cost with them, with one state each.
        """
        links = sorted({number for node in nodes for number in self._around[node] if self.links[number].transfer < 0})
        reached = sorted({int(index) for node in nodes for index in self._touching(node)})
        ends = [end for number in links for end in self.links[number].ends]
        ends += [node for index in reached for node in self.model.transfers[index].nodes()]
        members = np.union1d(nodes, np.asarray(ends, dtype=np.int64))
        new, inside = {int(node): index for index, node in enumerate(members)}, set(nodes.tolist())
        states: list[IntArray | None] = [None if node in inside else plan[node : node + 1] for node in range(len(plan))]
        costs = [self.model.costs[node] if (kept := states[node]) is None else self.model.costs[node][kept] for node in members]
        edges: dict[Pair, FloatArray] = {}
        for number in links:
            i, j = self.links[number].ends
            rows, columns = (slice(None) if (kept := states[node]) is None else kept for node in (i, j))
            edges[new[i], new[j]] = self.model.edges[i, j][rows][:, columns]
        plain = replace(self.model, costs=costs, edges=edges, uses=[()] * len(members), limits=np.zeros(0), prices=np.zeros(0))
        made = Transfers(_renumbered(self.model.transfers[index].keep(states), new) for index in reached)
        return replace(plain, transfers=made, constant=0.0, cutoff=np.inf), members

    def _touching(self, node: int) -> IntArray:
        """The transfers that a node gives or reads."""
        flat = self.model.transfers.flat
        begin, end = flat.touched_first[[node, node + 1]] if node + 1 < len(flat.touched_first) else (0, 0)
        return flat.touched[begin:end]

    def _own(self, values: FloatArray, node: int) -> FloatArray:
        return values[self.offset[node] : self.offset[node + 1]]

    def _split(self, number: int) -> FloatArray:
        (rows, columns), start = self.links[number].shape, self._table_start[number]
        return self._splits[start : start + rows * columns].reshape(rows, columns)

    def _message(self, number: int, direction: int) -> FloatArray:
        start = self._message_start[direction]
        return self._messages[direction][start[number] : start[number + 1]]

    def _take_back(self, number: int, first: FloatArray, second: FloatArray) -> None:
        """Undo a link's reparameterisation: return the sender's share and both messages to the costs of its ends."""
        link = self.links[number]
        share = np.full(link.shape[1], np.inf)
        np.minimum.at(share, link.columns, np.floor(self._own(self._weights, link.j) * self._share[link.j]))
        first -= self._message(number, 1)[link.rows]
        second += (share - self._message(number, 0))[link.columns]

    def _transfers(self, new: dict[int, int], touched: list[int]) -> Transfers:
        """The transfers whose source and some readers are inside."""
        readers: dict[int, list[tuple[int, Link]]] = {}
        for number in touched:
            link = self.links[number]
            if link.transfer >= 0 and self.model.transfers[link.transfer].source in new:
                readers.setdefault(link.transfer, []).append((number, link))
        made = []
        for index, found in sorted(readers.items()):
            transfer = self.model.transfers[index]
            own = [(node, want) for node, want in transfer.readers if node in new]
            if own:
                prices = transfer.prices.copy()
                for number, link in found:
                    if transfer.readers[link.reader][0] not in new:
                        _leave(prices, transfer, link, self._split(number))
                made.append(Transfer(new[transfer.source], transfer.have, tuple((new[node], want) for node, want in own), prices))
        return Transfers(made)


def _renumbered(transfer: Transfer, new: dict[int, int]) -> Transfer:
    return replace(transfer, source=new[transfer.source], readers=tuple((new[node], want) for node, want in transfer.readers))


def _leave(prices: FloatArray, transfer: Transfer, link: Link, split: FloatArray) -> None:
    """Subtract an outside reader's split from the prices."""
    node, want = transfer.readers[link.reader]
    part = split.T if node < transfer.source else split
    prices[np.ix_(np.unique(transfer.have), np.unique(want))] -= np.where(np.isfinite(part), part, 0.0)
