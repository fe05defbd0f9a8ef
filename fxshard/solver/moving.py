"""What counts in rows: `Use`, of a node by its state or of a transfer by the layouts that it pays; those of transfers as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .arrays import FloatArray, IntArray
from .compiled import compiled
from .transfers import Flat, Transfer, Transfers, add


class Use(NamedTuple):
    """What counts in rows [lo, hi): of a node `amount` (k,) per state, of a transfer (given, wanted), once for each layout paid."""

    lo: int
    hi: int
    amount: FloatArray


class Moving:
    """The uses of transfers, `moved` per transfer: each is a transfer whose prices are its amounts."""

    def __init__(self, transfers: Sequence[Transfer], moved: Sequence[tuple[Use, ...]]) -> None:
        entries = [(index, use) for index, uses in enumerate(moved) for use in uses]
        self.empty = not entries
        self._copies = Transfers(replace(transfers[index], prices=use.amount) for index, use in entries)
        self._uses = [use for _, use in entries]
        self._transfer = [index for index, _ in entries]
        self.lo = np.asarray([use.lo for use in self._uses], dtype=np.int64)
        self.hi = np.asarray([use.hi for use in self._uses], dtype=np.int64)

    def steps(self, choices: IntArray, rows: int) -> FloatArray:
        """(rows + 1,) what the sum of each row differs by from that of the row before."""
        steps = np.zeros(rows + 1)
        if not self.empty:
            amounts = np.zeros(len(self.lo))
            _amounts(self._copies.flat, choices, np.arange(len(self.lo)), amounts)
            np.add.at(steps, self.lo, amounts)
            np.subtract.at(steps, self.hi, amounts)
        return steps

    def change(self, node: int, state: int, choices: IntArray, rows: int) -> FloatArray | None:
        """(rows,) what each sum changes by when a node takes another state, None where no transfer of it counts."""
        if self.empty or node + 1 >= len(self._copies.flat.touched_first):
            return None
        flat = self._copies.flat
        near = flat.touched[flat.touched_first[node] : flat.touched_first[node + 1]]
        if not len(near):
            return None
        before, after = np.zeros(len(near)), np.zeros(len(near))
        _amounts(flat, choices, near, before)
        old, choices[node] = choices[node], state
        _amounts(flat, choices, near, after)
        choices[node] = old
        steps = np.zeros(rows + 1)
        np.add.at(steps, self.lo[near], after - before)
        np.subtract.at(steps, self.hi[near], after - before)
        return np.cumsum(steps)[:-1]

    def local(self, row: int, choices: IntArray, offset: IntArray) -> FloatArray:
        """(states,) the sum of one row over what each state's transfers pay, all other nodes as chosen."""
        total = np.zeros(int(offset[-1]))
        if not self.empty:
            live = (self.lo <= row) & (row < self.hi)
            add(self._copies.flat, live, np.arange(len(offset) - 1), choices, offset, np.zeros_like(total), total)
        return total

    def weighted(self, cumulated: FloatArray, count: int) -> list[FloatArray | float]:
        """Per transfer its amounts times the multipliers of their rows, whose cumulative sums (rows + 1,) are given."""
        sums: list[FloatArray | float] = [0.0] * count
        for index, use in zip(self._transfer, self._uses, strict=True):
            sums[index] = sums[index] + use.amount * (cumulated[use.hi] - cumulated[use.lo])
        return sums

    def largest(self, rows: int) -> FloatArray:
        """(rows,) what the sum of each row is at most."""
        steps = np.zeros(rows + 1)
        for copy, use in zip(self._copies, self._uses, strict=True):
            most = np.sort(use.amount, axis=1)[:, ::-1][:, : len(copy.readers)].sum(axis=1).max(initial=0.0)
            steps[use.lo] += most
            steps[use.hi] -= most
        return np.cumsum(steps)[:-1]


@compiled
def _amounts(flat: Flat, choices: IntArray, which: IntArray, amounts: FloatArray) -> None:
    """Fills in the cost of some transfers."""
    for k in range(len(which)):
        t = which[k]
        row = flat.price_start[t] + flat.have[flat.have_start[t] + choices[flat.source[t]]] * flat.width[t]
        paid = np.zeros(flat.width[t], dtype=np.bool_)
        for r in range(flat.first[t], flat.first[t + 1]):
            layout = flat.want[flat.want_start[r] + choices[flat.reader[r]]]
            if not paid[layout]:
                paid[layout] = True
                amounts[k] += flat.prices[row + layout]
