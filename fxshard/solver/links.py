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
    """The links of a model, and the prices of its transfers as they are split between them now."""

    def __init__(self, model: Model) -> None:
        self.links = [Link(i, j, np.arange(table.shape[0]), np.arange(table.shape[1]), table) for (i, j), table in model.edges.items()]
        self._cells = self._slots = 0
        slots: list[IntArray] = []
        for index, transfer in enumerate(model.transfers):
            self._add(index, transfer, slots)
        self.values = np.concatenate([link.table.ravel() for link in self.links if link.cells >= 0] or [np.zeros(0)])
        slot = np.concatenate([*slots, np.zeros(0, dtype=np.int64)])
        _, self._first, self._slot, self._count = np.unique(slot, return_index=True, return_inverse=True, return_counts=True)

    def table(self, link: Link) -> FloatArray:
        """A link's table as it is split now."""
        if link.cells < 0:
            return link.table
        return self.values[link.cells : link.cells + link.table.size].reshape(link.table.shape)

    def rebalance(self, slack: FloatArray) -> None:
        """Share out evenly what the links can spare. slack: (cells,) how much each entry may fall without harm."""
        known = np.isfinite(self.values) & ~np.isnan(slack)
        spare = np.where(known, np.minimum(self.values, slack), 0.0)
        pool = np.bincount(self._slot, weights=spare, minlength=len(self._count))
        each = np.floor(pool / self._count)
        self.values += each[self._slot] - spare
        self.values[self._first] += pool - each * self._count

    def _add(self, index: int, transfer: Transfer, slots: list[IntArray]) -> None:
        """The links of one transfer; where one reader alone can want a layout it bears the price."""
        wants = [np.unique(want, return_inverse=True) for _, want in transfer.readers]
        given, have = np.unique(transfer.have, return_inverse=True)
        count = np.bincount(np.concatenate([wanted for wanted, _ in wants]), minlength=transfer.prices.shape[1])
        taken = np.zeros(len(count))
        for reader, ((node, _), (wanted, want)) in enumerate(zip(transfer.readers, wants, strict=True)):
            prices = transfer.prices[np.ix_(given, wanted)]
            table = np.floor(prices / count[wanted])
            first = taken[wanted] == 0
            with np.errstate(invalid="ignore"):
                table = np.where(first & np.isfinite(prices), prices - (count[wanted] - 1) * table, table)
            taken[wanted] = 1
            cells = -1
            slot = given[:, None] * len(count) + wanted + self._slots
            turned = node < transfer.source
            if len(transfer.readers) > 1:
                cells = self._cells
                self._cells += table.size
                slots.append((slot.T if turned else slot).ravel())
            ends = (node, transfer.source, want, have, table.T) if turned else (transfer.source, node, have, want, table)
            self.links.append(Link(*ends, index, reader, cells))
        if len(transfer.readers) > 1:
            self._slots += transfer.prices.size
