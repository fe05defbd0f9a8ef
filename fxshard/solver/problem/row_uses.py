"""Contributions to rows (`Use`), of nodes by state and of transfers by the layouts paid; those of transfers also as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fxshard.compiled import compiled
from fxshard.solver.problem.arrays import FloatArray, IntArray, starts
from fxshard.solver.problem.transfers import Flat, Transfer, Transfers, add, paid


class Use(NamedTuple):
    """A contribution to rows [lo, hi): `amount` is (k,) per state for a node, (given, wanted) per layout paid for a transfer."""

    lo: int
    hi: int
    amount: FloatArray


class MovedUses(NamedTuple):
    """U uses of transfers as flat arrays, in the order of the transfers."""

    flat: Flat  # of U transfers whose prices are the amounts
    lo: IntArray  # (U,)
    hi: IntArray  # (U,)
    first: IntArray  # (T + 1,) where the uses of each transfer begin


class Moving:
    """The uses of transfers (`moved`, per transfer). Each is held as a copy of its transfer with its amounts as prices."""

    def __init__(self, transfers: Sequence[Transfer], moved: Sequence[tuple[Use, ...]]) -> None:
        entries = [(index, use) for index, uses in enumerate(moved) for use in uses]
        self.empty = not entries
        self._copies = Transfers(replace(transfers[index], prices=use.amount) for index, use in entries)
        self._uses = [use for _, use in entries]
        self._transfer = [index for index, _ in entries]
        self.lo = np.asarray([use.lo for use in self._uses], dtype=np.int64)
        self.hi = np.asarray([use.hi for use in self._uses], dtype=np.int64)
        self._first = starts([len(uses) for uses in moved] if moved else [0] * len(transfers))

    @cached_property
    def flat(self) -> MovedUses:
        """The uses as flat arrays, computed once."""
        return MovedUses(self._copies.flat, self.lo, self.hi, self._first)

    def steps(self, choices: IntArray, rows: int) -> FloatArray:
        """(rows + 1,) the difference between each row's sum and that of the row before."""
        steps = np.zeros(rows + 1)
        if not self.empty:
            amounts = np.zeros(len(self.lo))
            _amounts(self._copies.flat, choices, amounts)
            np.add.at(steps, self.lo, amounts)
            np.subtract.at(steps, self.hi, amounts)
        return steps

    def local(self, row: int, nodes: IntArray, choices: IntArray, offset: IntArray, base: FloatArray, total: FloatArray) -> None:
        """Sets total to base plus the transfers' sum in one row, per state of `nodes` with all other nodes as chosen; (states,)."""
        live = (self.lo <= row) & (row < self.hi)
        add(self._copies.flat, live, nodes, choices, offset, base, total)

    def weighted(self, cumulated: FloatArray, count: int) -> list[FloatArray | float]:
        """Per transfer its amounts times the multipliers of their rows; cumulated: (rows + 1,) cumulative sums of the multipliers."""
        sums: list[FloatArray | float] = [0.0] * count
        for index, use in zip(self._transfer, self._uses, strict=True):
            sums[index] = sums[index] + use.amount * (cumulated[use.hi] - cumulated[use.lo])
        return sums

    def largest(self, rows: int) -> FloatArray:
        """(rows,) an upper bound on the sum of each row."""
        steps = np.zeros(rows + 1)
        for copy, use in zip(self._copies, self._uses, strict=True):
            most = np.sort(use.amount, axis=1)[:, ::-1][:, : len(copy.readers)].sum(axis=1).max(initial=0.0)
            steps[use.lo] += most
            steps[use.hi] -= most
        return np.cumsum(steps)[:-1]


@compiled
def _amounts(flat: Flat, choices: IntArray, amounts: FloatArray) -> None:
    """Sets amounts to the cost of each transfer."""
    for transfer in range(len(amounts)):
        amounts[transfer] = paid(flat, transfer, choices)
