"""What pruning leaves of a model, as a model without transfers, for exact search.

A transfer of one reader is an edge. A transfer whose prices are shared by readers, or whose memory counts, becomes a node with the joint
choices of source and readers as its states, or a node per layout where there are too many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fxshard.solver.bounds.links import Link
from fxshard.solver.bounds.merged_links import MergedSweeper
from fxshard.solver.bounds.pruning import Slacks
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Pair, Undo, add_edge
from fxshard.solver.problem.row_uses import Use
from fxshard.solver.problem.transfers import Transfer, Transfers

MAX_JOINT = 400
"""The most states of a node for the joint choices of a value's source and readers; beyond, a node per layout is used."""


def write_out(model: Model, slacks: Slacks, sweeper: Sweeper) -> tuple[Model, Undo]:
    """The model of the remaining states with the costs of `slacks`, and every transfer as nodes and edges."""
    keep = [np.flatnonzero(np.isfinite(costs)) for costs in slacks.costs]
    if not all(len(states) for states in keep):
        raise Exhausted
    writer = _Writer(model, slacks, keep, merged=isinstance(sweeper, MergedSweeper))
    if isinstance(sweeper, MergedSweeper):
        for link, table in zip(sweeper.links, slacks.tables, strict=True):
            writer.edge(link, table)
        found = sweeper.splits.separated(slacks.tables)
    else:
        found = sweeper.links, slacks.tables, slacks.splits
    parts: list[list[_Part]] = [[] for _ in model.transfers]
    for link, table, split in zip(*found, strict=True):
        if writer.needs_node(link.transfer):
            parts[link.transfer].append(writer.part(link, table, split))
        elif not writer.merged:
            writer.edge(link, table)
    for index, readings in enumerate(parts):
        if readings:
            writer.transfer(index, readings)
    count = len(model)

    def undo(choices: IntArray) -> IntArray:
        return np.asarray([states[x] for states, x in zip(keep, choices[:count], strict=True)], dtype=np.int64)

    return writer.finish(), undo


@dataclass(frozen=True)
class _Part:
    """One reader's link of a transfer over all layouts (given, wanted). slack: the least cost. rest: what the link adds to the transfer's
    node: its slack, unless links are merged, so that an edge has that, less the split price."""

    slack: FloatArray
    rest: FloatArray


class _Writer:
    """The model under construction: the original nodes with the states in `keep`, then one or more nodes per transfer.

    merged: whether links are merged. They are edges then, and transfers add what they cost on top of their splits.
    """

    def __init__(self, model: Model, slacks: Slacks, keep: list[IntArray], merged: bool) -> None:
        self.model, self.slacks, self.keep, self.merged = model, slacks, keep, merged
        self.costs = [costs[states] for costs, states in zip(slacks.costs, keep, strict=True)]
        self.edges: dict[Pair, FloatArray] = {}
        self._uses: list[tuple[Use, ...]] = [
            tuple(use._replace(amount=use.amount[states]) for use in uses) for uses, states in zip(model.uses, keep, strict=True)
        ]

    def uses(self, transfer: int) -> tuple[Use, ...]:
        """The uses of a transfer."""
        return self.model.moved[transfer] if self.model.moved else ()

    def needs_node(self, transfer: int) -> bool:
        """Whether a transfer is more than an edge: several readers share its prices, or rows use it. False for -1, none."""
        return transfer >= 0 and (len(self.model.transfers[transfer].readers) > 1 or bool(self.uses(transfer)))

    def part(self, link: Link, table: FloatArray, split: FloatArray) -> _Part:
        """The part of a transfer that one of its links is. table: its slack; split: its part of the prices."""
        transfer = self.model.transfers[link.transfer]
        node, want = transfer.readers[link.reader]
        if self.merged and self._read_before(transfer, link.reader):  # both readings are in one merged table, which counts once
            table = np.where(np.isfinite(table), 0.0, np.inf)
        cells = np.ix_(np.unique(transfer.have), np.unique(want))
        slack = np.full(transfer.prices.shape, np.inf)
        rest = slack.copy()
        if node < transfer.source:
            table, split = table.T, split.T
        slack[cells] = table
        rest[cells] = np.where(np.isfinite(split), 0.0 if self.merged else table, np.inf) - np.where(np.isfinite(split), split, 0.0)
        return _Part(slack, rest)

    @staticmethod
    def _read_before(transfer: Transfer, reader: int) -> bool:
        """Whether an earlier reader of a transfer is the same node."""
        return transfer.readers[reader][0] in (node for node, _ in transfer.readers[:reader])

    def edge(self, link: Link, table: FloatArray) -> None:
        """Add a link without shared prices."""
        rows, columns = link.rows[self.keep[link.i]], link.columns[self.keep[link.j]]
        add_edge(self.edges, link.i, link.j, table[np.ix_(rows, columns)])

    def transfer(self, index: int, parts: list[_Part]) -> None:
        """Add a node for the joint choices of source and readers, or one per layout where there are too many."""
        transfer = self.model.transfers[index]
        have = transfer.have[self.keep[transfer.source]]
        readers = [(node, want[self.keep[node]]) for node, want in transfer.readers]
        joint = _joint(transfer.prices, np.unique(have), [np.unique(want) for _, want in readers], parts, self.slacks.room, self.merged)
        if joint is None:
            self._by_layout(transfer, have, readers, parts, self.uses(index))
            return
        states, costs = joint
        if not len(costs):
            raise Exhausted
        node = self._node(costs, tuple(use._replace(amount=_paid(use.amount, states)) for use in self.uses(index)))
        for column, (other, layouts) in zip(states.T, [(transfer.source, have), *readers], strict=True):
            add_edge(self.edges, node, other, np.where(column[:, None] == layouts, 0.0, np.inf))

    def finish(self) -> Model:
        """The complete model."""
        written = replace(self.model, costs=self.costs, edges=self.edges, uses=self._uses, constant=self.slacks.constant)
        return replace(written, transfers=Transfers(), moved=())

    def _by_layout(
        self, transfer: Transfer, have: IntArray, readers: list[tuple[int, IntArray]], parts: list[_Part], uses: tuple[Use, ...]
    ) -> None:
        """Add a node per layout l with the states absent and present, which every reader of l requires to be present.

        Where rows use the transfer, there is a present state per layout that the source gives.
        """
        given = np.unique(have)
        for (reader, want), part in zip(readers, parts, strict=True):
            add_edge(self.edges, transfer.source, reader, part.rest[np.ix_(have, want)])
        for layout in np.unique(np.concatenate([want for _, want in readers])):
            if uses:
                made = tuple(use._replace(amount=np.append(0.0, use.amount[given, layout])) for use in uses)
                there = self._node(np.append(0.0, transfer.prices[given, layout]), made)
                paid = np.where(have[:, None] == given, 0.0, np.inf)
            else:
                there = self._node(np.zeros(2))
                paid = transfer.prices[have, layout][:, None]
            add_edge(self.edges, transfer.source, there, np.concatenate([np.zeros((len(have), 1)), paid], axis=1))
            for reader, want in readers:
                if (want == layout).any():
                    needs = np.where(want == layout, np.inf, 0.0)
                    add_edge(self.edges, there, reader, np.stack([needs, *np.zeros((paid.shape[1], len(want)))]))

    def _node(self, costs: FloatArray, uses: tuple[Use, ...] = ()) -> int:
        self.costs.append(costs)
        self._uses.append(uses)
        return len(self.costs) - 1


def _paid(amounts: FloatArray, states: IntArray) -> FloatArray:
    """Per state the sum of amounts (given, wanted) over the distinct wanted layouts; states: (states, 1 + readers), given first."""
    total = np.zeros(len(states))
    for column in range(1, states.shape[1]):
        new = (states[:, 1:column] != states[:, column, None]).all(axis=1)
        total += np.where(new, amounts[states[:, 0], states[:, column]], 0.0)
    return total


def _joint(
    prices: FloatArray, have: IntArray, wants: list[IntArray], parts: list[_Part], room: float, merged: bool
) -> tuple[IntArray, FloatArray] | None:
    """All joint choices (layout given, layout wanted by each reader) within the room, and their costs; None beyond MAX_JOINT of them.

    merged: whether edges, not these costs, have the slack of links.
    """
    states, floor = have[:, None], np.zeros(len(have))
    costs = floor
    for want, part in zip(wants, parts, strict=True):
        row, column = np.divmod(np.arange(len(states) * len(want)), len(want))
        given, layout = states[row, 0], want[column]
        floor = floor[row] + part.slack[given, layout]
        there = (states[row, 1:] == layout[:, None]).any(axis=1)
        costs = costs[row] + part.rest[given, layout] + np.where(there, 0.0, prices[given, layout])
        states = np.concatenate([states[row], layout[:, None]], axis=1)
        fits = np.flatnonzero((floor < room) & np.isfinite(costs))
        states, floor, costs = states[fits], floor[fits], costs[fits]
        if len(states) > MAX_JOINT:
            return None
    fits = np.flatnonzero((costs + floor if merged else costs) < room)
    return states[fits], costs[fits]
