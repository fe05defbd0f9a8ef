"""Reduced-cost fixing: forbid the states and pairs that the bound excludes from every better plan.

After a sweep the model is the bound plus nonnegative slacks. A second pass in the other direction accumulates along the chains the least
cost of each state above the bound, its *excess*. States and pairs that reach the cutoff are forbidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.sweep_kernels import collect, forbid_pairs
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model

HALVINGS = 12
"""Bisection steps in the search for a target."""


@dataclass(frozen=True)
class Slacks:
    """A model as constant + node costs + slacks of links, with `inf` for entries in no plan below the cutoff.

    costs: per node (k,), without the multipliers' part. tables: per link of the sweeper, by classes. splits: the part of each table that
    is a split of prices; a transfer costs, on top of the links, the difference between its prices and the splits.
    excess: (states,) the least cost of each state above the bound, `inf` from `room` on.
    room: the cutoff less the bound.
    """

    constant: float
    costs: list[FloatArray]
    tables: list[FloatArray]
    splits: list[FloatArray]
    excess: FloatArray
    room: float


def prune(ascent: Ascent) -> Model:
    """The model rewritten by its slacks: the same choices at the same costs. For models without transfers."""
    slacks = find_slacks(ascent, ascent.model.cutoff)
    edges = {link.ends: table for link, table in zip(ascent.sweeper.links, slacks.tables, strict=True)}
    return replace(ascent.model, costs=slacks.costs, edges=edges, constant=slacks.constant, prices=ascent.multipliers)


def portion(ascent: Ascent, cutoff: float, entries: int) -> tuple[Model, float]:
    """The model pruned to a target, and that target: the highest one, up to the cutoff, that leaves at most about `entries` pairs.

    Raises `Exhausted` where nothing below the cutoff is left.
    """
    low, high = ascent.bound, cutoff
    if _pairs(find_slacks(ascent, cutoff)) <= entries:
        low = cutoff
    for _ in range(HALVINGS):
        middle = float(np.ceil((low + high) / 2))
        if middle >= high or ascent.budget.late:
            break
        try:
            pairs = _pairs(find_slacks(ascent, middle))
        except Exhausted:
            pairs = 0
        low, high = (middle, high) if pairs <= entries else (low, middle)
    ascent.model = replace(ascent.model, cutoff=low)
    return prune(ascent), low


def _pairs(slacks: Slacks) -> int:
    return sum(int(np.isfinite(table).sum()) for table in slacks.tables)


def find_slacks(ascent: Ascent, cutoff: float) -> Slacks:
    """The slacks after one more sweep against node order; raises `Exhausted` where it proves that no plan is below the cutoff."""
    model, sweeper = ascent.model, ascent.sweeper
    wiring, splits, nodes = sweeper.wiring, sweeper.splits, sweeper.offset[:-1]
    sweeper.sweep(1)
    ascent.budget.charge(3 * sweeper.entries)  # the sweep, then two passes over the slacks
    tables, kept = sweeper.slacks()
    least = [_least(kept, nodes), _least(tables, splits.own[:-1])]
    if np.isinf(least[0]).any() or np.isinf(least[1]).any():
        raise Exhausted
    total = model.constant + float(least[0].sum() + least[1].sum())
    kept -= np.repeat(least[0], np.diff(sweeper.offset))
    tables -= np.repeat(least[1], np.diff(splits.own))
    room = cutoff - (total - ascent.memory.allowance(ascent.multipliers))
    arrived = np.empty_like(sweeper.messages[0])
    excess = collect(wiring, tables, kept, sweeper.chains, arrived)
    excess = np.where(excess < room, excess, np.inf)
    forbid_pairs(wiring, tables, excess, arrived, sweeper.chains, room)
    paid = ascent.memory.prices(ascent.multipliers)
    costs = np.split(np.where(np.isinf(excess), np.inf, kept - paid), nodes[1:])
    every = range(len(sweeper.links))
    return Slacks(total, costs, [splits.table(k, tables) for k in every], [splits.table(k) for k in every], excess, room)


def excess_of(ascent: Ascent) -> tuple[FloatArray, float]:
    """(states,) the least cost of each state above a bound, and that bound, after one more sweep against node order."""
    sweeper = ascent.sweeper
    sweeper.sweep(1)
    ascent.budget.charge(2 * sweeper.entries)
    least, kept = sweeper.least_slacks()
    own = _least(kept, sweeper.offset[:-1])
    bound = ascent.model.constant - ascent.memory.allowance(ascent.multipliers) + float(own.sum() + least.sum())
    return sweeper.excess(least, kept - np.repeat(own, np.diff(sweeper.offset))), bound


def _least(values: FloatArray, starts: IntArray) -> FloatArray:
    """The least value of each part; no part is empty."""
    return np.minimum.reduceat(values, starts) if len(starts) else np.zeros(0)
