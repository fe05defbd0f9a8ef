"""What message passing runs on: tables between two nodes, on classes of their states that the table tells apart.

An edge is one link. A transfer is a link per reader, on layouts instead of states; where several readers want the same
layout its price is split between them, evenly at first. After every sweep `Splits.rebalance` takes from each link what
it had no use for and gives it to all alike, which never lowers the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import FloatArray, IntArray
from .model import Model
from .transfers import Transfer


@dataclass(frozen=True)
class Link:
    """A table between nodes i < j: `rows` (k_i,) and `columns` (k_j,) give the class of each state.

    transfer, reader: whose reader it is of the model's transfers and theirs, -1 for an edge; its classes are the layouts
    that occur, ascending. cells: where its table begins in `Splits.values`, -1 for one that is not split.
    """

    i: int
    j: int
    rows: IntArray
    columns: IntArray
    table: FloatArray
    transfer: int = -1
    reader: int = -1
    cells: int = -1

    @property
    def ends(self) -> tuple[int, int]:
        """Its nodes."""
        return self.i, self.j

    def classes(self, end: int) -> IntArray:
        """The class of each state of node i (end 0) or j (end 1)."""
        return self.columns if end else self.rows


class Splits:
    """The links of a model, and the prices of its transfers as they are split between them now.

    `values` holds the tables of all links that are split, one after the other; a *slot* is the price that cells share.
    """

    def __init__(self, model: Model) -> None:
        self.links = [Link(i, j, np.arange(table.shape[0]), np.arange(table.shape[1]), table) for (i, j), table in model.edges.items()]
        self._known: dict[bytes, tuple[IntArray, IntArray]] = {}
        self._cells = self._slots = 0
        slots: list[IntArray] = []
        for index, transfer in enumerate(model.transfers):
            self._add(index, transfer, slots)
        self.values = np.concatenate([link.table.ravel() for link in self.links if link.cells >= 0] or [np.zeros(0)])
        self._slot = np.concatenate([*slots, np.zeros(0, dtype=np.int64)])
        self._count = np.maximum(np.bincount(self._slot, minlength=self._slots), 1)
        self._first = np.zeros(self._slots, dtype=np.int64)
        self._first[self._slot[::-1]] = np.arange(len(self._slot))[::-1]
        self._finite = bool(np.isfinite(self.values).all())

    def table(self, link: Link) -> FloatArray:
        """A link's table as it is split now."""
        if link.cells < 0:
            return link.table
        return self.values[link.cells : link.cells + link.table.size].reshape(link.table.shape)

    def rebalance(self, slack: FloatArray) -> None:
        """Share out evenly what the links can spare. slack: (cells,) how much each entry may fall without harm."""
        spare = np.minimum(self.values, slack)
        if not self._finite:
            spare = np.where(np.isfinite(self.values) & ~np.isnan(slack), spare, 0.0)
        pool = np.bincount(self._slot, weights=spare, minlength=self._slots)
        each = np.floor(pool / self._count)
        over = pool - each * self._count
        left = np.flatnonzero(over)
        self.values += each[self._slot]
        self.values -= spare
        self.values[self._first[left]] += over[left]

    def _add(self, index: int, transfer: Transfer, slots: list[IntArray]) -> None:
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
            turned, cells = node < transfer.source, -1
            if len(transfer.readers) > 1:
                cells = self._cells
                self._cells += table.size
                slot = given[:, None] * width + wanted + self._slots
                slots.append((slot.T if turned else slot).ravel())
            if turned:
                self.links.append(Link(node, transfer.source, want, have, table.T, index, reader, cells))
            else:
                self.links.append(Link(transfer.source, node, have, want, table, index, reader, cells))
        if len(transfer.readers) > 1:
            self._slots += transfer.prices.size

    def _classes(self, layouts: IntArray) -> tuple[IntArray, IntArray]:
        """The layouts that occur, ascending, and which of them each state has; layers repeat, so arrays do."""
        key = layouts.tobytes()
        if key not in self._known:
            values, inverse = np.unique(layouts, return_inverse=True)
            self._known[key] = values, inverse.astype(np.int64)
        return self._known[key]
