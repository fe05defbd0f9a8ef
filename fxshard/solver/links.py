"""What message passing runs on: tables between two nodes, on classes of their states that the table tells apart.

An edge is one link. A transfer is a link per reader, on layouts instead of states; where several readers want the same
layout its price is split between them, evenly at first. After every pair of sweeps `Splits.rebalance` takes from each link what
it had no use for and gives it to all alike, which never lowers the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import FloatArray, IntArray, starts
from .kernels import rebalance, reprice
from .model import Model
from .transfers import Transfer, Transfers


@dataclass(frozen=True)
class Link:
    """A table between nodes i < j: `rows` (k_i,) and `columns` (k_j,) give the class of each state, `shape` says how many.

    transfer, reader: whose reader it is of the model's transfers and theirs, -1 for an edge; its classes are the layouts
    that occur, ascending.
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
        """Its nodes."""
        return self.i, self.j

    def classes(self, end: int) -> IntArray:
        """The class of each state of node i (end 0) or j (end 1)."""
        return self.columns if end else self.rows


class Splits:
    """The links of a model and their tables, those of transfers as they are split between readers now.

    values: all tables, one after the other and each row by row, at `start`. cells: which of them are split, by *slot*, the price
    that they share.
    """

    def __init__(self, model: Model) -> None:
        self.links: list[Link] = []
        self._known: dict[bytes, tuple[IntArray, IntArray]] = {}
        self._tables: list[FloatArray] = []
        self._shares: list[tuple[int, IntArray]] = []
        self._slots = 0
        for (i, j), table in model.edges.items():
            self._link(Link(i, j, np.arange(table.shape[0]), np.arange(table.shape[1]), (table.shape[0], table.shape[1])), table)
        for index, transfer in enumerate(model.transfers):
            self._add(index, transfer)
        self.start = starts([table.size for table in self._tables])
        self.values = np.concatenate([*(table.ravel() for table in self._tables), np.zeros(0)])
        none = np.zeros(0, dtype=np.int64)
        cells = np.concatenate([*(self.start[k] + np.arange(slots.size) for k, slots in self._shares), none])
        slot = np.concatenate([*(slots.ravel() for _, slots in self._shares), none])
        self.cells = cells[np.argsort(slot, kind="stable")]
        counts = np.bincount(slot, minlength=1)
        self._first = starts(counts[counts > 0])
        self._slot = np.flatnonzero(counts)
        self.shared = np.zeros(len(self.links), dtype=np.int64)
        self.shared[[k for k, _ in self._shares]] = 1
        del self._tables, self._shares

    def table(self, index: int, values: FloatArray | None = None) -> FloatArray:
        """A link's part, (classes of i, classes of j), of values laid out as the tables; of the tables as they are by default."""
        whole = self.values if values is None else values
        return whole[self.start[index] : self.start[index + 1]].reshape(self.links[index].shape)

    def rebalance(self, slack: FloatArray) -> None:
        """Share out evenly what the links can spare. slack: laid out as the values, how much each may fall without harm."""
        rebalance(self.values, slack, self.cells, self._first)

    def price(self, transfers: Transfers) -> None:
        """Take other prices, finite where they were: what they rise by is shared evenly, what they fall by taken in proportion."""
        prices = np.concatenate([*(t.prices.ravel() for t in transfers if len(t.readers) > 1), np.zeros(0)])
        reprice(self.values, prices[self._slot], self.cells, self._first)
        for index, link in enumerate(self.links):
            if link.transfer >= 0 and not self.shared[index]:
                transfer = transfers[link.transfer]
                given, wanted = self._classes(transfer.have)[0], self._classes(transfer.readers[link.reader][1])[0]
                table = transfer.prices[np.ix_(given, wanted)]
                self.table(index)[:] = table if link.i == transfer.source else table.T

    def _link(self, link: Link, table: FloatArray, slots: IntArray | None = None) -> None:
        if slots is not None:
            self._shares.append((len(self.links), slots))
        self.links.append(link)
        self._tables.append(table)

    def _add(self, index: int, transfer: Transfer) -> None:
        """The links of one transfer; the price of a layout that several want is split evenly, the first has what is over."""
        given, have = self._classes(transfer.have)
        wants = [self._classes(want) for _, want in transfer.readers]
        width = transfer.prices.shape[1]
        count = np.bincount(np.concatenate([wanted for wanted, _ in wants]), minlength=width)
        even: FloatArray = np.floor(transfer.prices[given] / np.maximum(count, 1))
        over: FloatArray = np.where(np.isfinite(even), transfer.prices[given], 0.0) - np.where(np.isfinite(even), even, 0.0) * count
        for reader, ((node, _), (wanted, want)) in enumerate(zip(transfer.readers, wants, strict=True)):
            table: FloatArray = even[:, wanted] + over[:, wanted]
            over[:, wanted] = 0.0
            slots = given[:, None] * width + wanted + self._slots if len(wants) > 1 else None
            if node < transfer.source:
                link = Link(node, transfer.source, want, have, (len(wanted), len(given)), index, reader)
                self._link(link, table.T, None if slots is None else slots.T)
            else:
                link = Link(transfer.source, node, have, want, (len(given), len(wanted)), index, reader)
                self._link(link, table, slots)
        if len(wants) > 1:
            self._slots += transfer.prices.size

    def _classes(self, layouts: IntArray) -> tuple[IntArray, IntArray]:
        """The layouts that occur, ascending, and which of them each state has; layers repeat, so arrays do."""
        key = layouts.tobytes()
        if key not in self._known:
            values, inverse = np.unique(layouts, return_inverse=True)
            self._known[key] = values, inverse.astype(np.int64)
        return self._known[key]
