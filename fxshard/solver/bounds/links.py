"""The pairwise tables of message passing, over classes of states with equal costs.

An edge is one link. A transfer is a link per reader, with layouts as classes. Where several readers want the same layout, its price is
split between their links, evenly at first. After every pair of sweeps `Splits.rebalance` takes the slack of each link and redistributes it
evenly, which never lowers the bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxshard.solver.bounds.sharing import Priced, Sharing, rebalance, reprice
from fxshard.solver.problem.arrays import FloatArray, IntArray, starts
from fxshard.solver.problem.model import Model
from fxshard.solver.problem.transfers import Transfer


@dataclass(frozen=True)
class Link:
    """A table between nodes i < j. rows (k_i,), columns (k_j,): the class of each state. shape: the numbers of classes.

    transfer, reader: indexes of the transfer and of its reader, -1 for an edge. The classes of a transfer are the layouts that occur,
    ascending.
    """

    i: int
    j: int
    rows: IntArray
    columns: IntArray
    shape: tuple[int, int]
    transfer: int = -1
    reader: int = -1

    @property
    def ends(self) -> tuple[int, int]:
        """The two nodes."""
        return self.i, self.j

    def classes(self, end: int) -> IntArray:
        """The class of each state of node i (end 0) or j (end 1)."""
        return self.columns if end else self.rows


class Splits:
    """The links of a model and their tables, with the current split of the prices of transfers between readers.

    values: all tables, flattened; a link's table begins at `start`. Constant tables that are the same array (repeated layers) are stored
    once. own: (links + 1,) the offsets in arrays that hold a separate table per link. sharing: the links with shared prices.
    rates: (uses,) the cost per unit of each use of transfers that the prices include.
    """

    def __init__(self, model: Model) -> None:
        self.links: list[Link] = []
        self._known: dict[bytes, tuple[IntArray, IntArray]] = {}
        self._made: dict[Hashable, list[FloatArray]] = {}
        self._tables: list[FloatArray] = []
        self._fixed: list[bool] = []
        self._model = model
        self._first: list[int] = []
        for (i, j), table in model.edges.items():
            self._link(Link(i, j, np.arange(table.shape[0]), np.arange(table.shape[1]), (table.shape[0], table.shape[1])), table, True)
        for index, transfer in enumerate(model.transfers):
            self._add(index, transfer)
        self.own = starts([table.size for table in self._tables])
        self.start, self.values = self._laid_out()
        del self._tables, self._fixed, self._made
        self.rates = np.zeros(len(model.moving.flat.lo))
        self.sharing = self._sharing([index for index, transfer in enumerate(model.transfers) if len(transfer.readers) > 1])
        self.shared = np.zeros(len(self.links), dtype=np.int64)
        self.shared[self.sharing.link] = 1

    def _laid_out(self) -> tuple[IntArray, FloatArray]:
        """(links,) the start of each link's table, and the values."""
        places: dict[int, int] = {}
        start, end, parts = np.zeros(len(self.links), dtype=np.int64), 0, []
        for k, (table, fixed) in enumerate(zip(self._tables, self._fixed, strict=True)):
            start[k] = places.setdefault(id(table) if fixed else -1 - k, end)
            if start[k] == end:
                parts.append((end, table))
                end += table.size
        values = np.empty(end)
        for begin, table in parts:
            values[begin : begin + table.size].reshape(table.shape)[:] = table
        return start, values

    @cached_property
    def _priced(self) -> tuple[Sharing, IntArray, IntArray]:
        """The sharing of all transfers; the layouts that their sources give, concatenated; and the offsets of each transfer's."""
        given = [self._classes(t.have)[0] for t in self._model.transfers]
        return self._sharing(range(len(given))), np.concatenate([*given, np.zeros(0, dtype=np.int64)]), starts([len(one) for one in given])

    def _sharing(self, which: Sequence[int]) -> Sharing:
        transfers = [self._model.transfers[index] for index in which]
        counts, firsts = [len(transfer.readers) for transfer in transfers], [self._first[index] for index in which]
        links = np.concatenate([*(np.arange(k, k + n) for k, n in zip(firsts, counts, strict=True)), np.zeros(0, dtype=np.int64)])
        columns, across, wanted = [], [], []
        for k in links:
            link = self.links[k]
            transfer = self._model.transfers[link.transfer]
            layouts = self._classes(transfer.readers[link.reader][1])[0]
            column = np.full(transfer.prices.shape[1], -1, dtype=np.int64)
            column[layouts] = np.arange(len(layouts))
            columns.append(column)
            wanted.append(len(layouts))
            across.append(link.i != transfer.source)
        return Sharing(
            starts(counts),
            links.astype(np.int64),
            self.start[links.astype(np.int64)],
            np.asarray(across, dtype=np.int64),
            np.asarray(wanted, dtype=np.int64),
            np.asarray([len(self._classes(t.have)[0]) for t in transfers], dtype=np.int64),
            np.asarray([t.prices.shape[1] for t in transfers], dtype=np.int64),
            np.concatenate([*columns, np.zeros(0, dtype=np.int64)]),
            starts([len(column) for column in columns]),
        )

    def table(self, index: int, values: FloatArray | None = None) -> FloatArray:
        """A link's table (classes of i, classes of j): the current one, or its part of `values`, which has a separate table per link."""
        rows, columns = self.links[index].shape
        whole, start = (self.values, self.start[index]) if values is None else (values, self.own[index])
        return whole[start : start + rows * columns].reshape(rows, columns)

    def rebalance(self, slack: FloatArray) -> None:
        """Redistribute the slack of links evenly. slack: laid out as `values`, how far each entry may fall without lowering a message."""
        rebalance(self.values, slack, self.sharing)

    def price(self, rates: FloatArray) -> None:
        """Change the rates of the uses of transfers, (uses,) cost per unit, and update the finite prices."""
        moved = self._model.moving.flat
        reprice(self.values, *self._priced, self._model.transfers.flat, Priced(moved.first, moved.flat, rates, self.rates))
        self.rates[:] = rates

    def _link(self, link: Link, table: FloatArray, fixed: bool) -> None:
        self.links.append(link)
        self._tables.append(table)
        self._fixed.append(fixed)

    def _add(self, index: int, transfer: Transfer) -> None:
        """Add the links of one transfer. Their tables are constant if it has one reader and no row uses it."""
        self._first.append(len(self.links))
        given, have = self._classes(transfer.have)
        wants = [self._classes(want) for _, want in transfer.readers]
        earlier = [node < transfer.source for node, _ in transfer.readers]
        key = id(transfer.prices), id(given), tuple((id(wanted), across) for (wanted, _), across in zip(wants, earlier, strict=True))
        if key not in self._made:
            self._made[key] = _split_evenly(transfer.prices, given, [wanted for wanted, _ in wants], earlier)
        fixed = len(wants) == 1 and not (self._model.moved and self._model.moved[index])
        for reader, ((node, _), (wanted, want), table) in enumerate(zip(transfer.readers, wants, self._made[key], strict=True)):
            if earlier[reader]:
                link = Link(node, transfer.source, want, have, (len(wanted), len(given)), index, reader)
            else:
                link = Link(transfer.source, node, have, want, (len(given), len(wanted)), index, reader)
            self._link(link, table, fixed)

    def _classes(self, layouts: IntArray) -> tuple[IntArray, IntArray]:
        """The layouts that occur, ascending, and the index of each state's among them; cached, since repeated layers have equal arrays."""
        key = layouts.tobytes()
        if key not in self._known:
            values, inverse = np.unique(layouts, return_inverse=True)
            self._known[key] = values, inverse.astype(np.int64)
        return self._known[key]


def _split_evenly(prices: FloatArray, given: IntArray, wants: Sequence[IntArray], across: Sequence[bool]) -> list[FloatArray]:
    """A table per reader, (given, wanted), transposed if `across`. Shared prices are split evenly; the first reader takes the remainder."""
    width = prices.shape[1]
    count = np.bincount(np.concatenate([*wants]), minlength=width)
    even: FloatArray = np.floor(prices[given] / np.maximum(count, 1))
    over: FloatArray = np.where(np.isfinite(even), prices[given], 0.0) - np.where(np.isfinite(even), even, 0.0) * count
    tables = []
    for wanted, turned in zip(wants, across, strict=True):
        table: FloatArray = even[:, wanted] + over[:, wanted]
        over[:, wanted] = 0.0
        tables.append(table.T if turned else table)
    return tables
