"""All uses of a model's nodes as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray, starts
from fxshard.solver.problem.row_uses import Use


class FlatUses(NamedTuple):
    """U uses of n nodes, node by node; each has an amount per state of its node."""

    first: IntArray  # (n + 1,) where each node's uses begin
    node: IntArray  # (U,)
    lo: IntArray  # (U,)
    hi: IntArray  # (U,)
    start: IntArray  # (U + 1,) where each use's amounts begin
    amount: FloatArray  # use by use


class UseTable:
    """The uses of n nodes; sizes: (n,) their numbers of states."""

    def __init__(self, sizes: IntArray, uses: Sequence[tuple[Use, ...]]) -> None:
        every = [use for terms in uses for use in terms]
        counts = np.asarray([len(terms) for terms in uses], dtype=np.int64)
        node = np.repeat(np.arange(len(counts)), counts)
        bounds = np.asarray([(use.lo, use.hi) for use in every], dtype=np.int64).reshape(-1, 2).T.copy()
        amount = np.concatenate([use.amount for use in every] or [np.zeros(0)])
        self.flat = FlatUses(starts(counts), node, bounds[0], bounds[1], starts(sizes[node]), amount)
        self.offset = starts(sizes)

    def steps(self, choices: IntArray, rows: int) -> FloatArray:
        """(rows + 1,) the difference between each row's sum and that of the row before."""
        flat = self.flat
        chosen = flat.amount[flat.start[:-1] + choices[flat.node]]
        begun, ended = (np.bincount(at, weights=chosen, minlength=rows + 1) for at in (flat.lo, flat.hi))
        return np.asarray(begun - ended, dtype=np.float64)

    def priced(self, cumulated: FloatArray) -> FloatArray:
        """(states,) amounts times the multipliers of their rows, rounded down; cumulated: (rows + 1,) the multipliers, cumulated."""
        flat = self.flat
        sizes = np.diff(flat.start)
        terms = flat.amount * np.repeat(cumulated[flat.hi] - cumulated[flat.lo], sizes)
        position = np.arange(len(flat.amount)) + np.repeat(self.offset[flat.node] - flat.start[:-1], sizes)
        rounded = np.floor(terms * (1 - 2.0**-50))  # the product may have been rounded up
        return np.bincount(position, weights=rounded, minlength=int(self.offset[-1])).astype(np.float64)
