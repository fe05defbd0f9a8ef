"""Plans combined: each node in a state that it has in some of them, and the best of all such plans searched for exactly.

At the best multipliers of a limit several plans cost the same, some of which exceed it and some of which do not. What fits best takes
some parts of the one and some of the other: few states are left to choose from, so that this is a small problem (crossover in
genetic algorithms, `path relinking' where there are two; in mixed-integer programming Rothberg's "An evolutionary algorithm for
polishing mixed integer programming solutions", 2007).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from .arrays import IntArray
from .bounds import Ascent
from .branching import Search
from .budget import Budget
from .highs import too_large
from .infeasible import Exhausted
from .model import Model, keep_states
from .pruning import excess_of
from .reductions import reduce
from .relax import Relaxation

COUNTS = (3, 6, 12)
"""Plans that are combined, one after the other."""

ENTRIES = 30_000
"""Table entries up to which the problem of what they leave is searched."""

WORK = 1_000_000_000
"""Entries that such a search may touch."""

PAIRS = 10

NEARBY = 0.03
"""Pairs of states over all links, in parts of all, that are searched by cases: those of the plans, and those of least excess."""

MOST_LEFT = 0.5
"""Part of all states from which that is as dear as the whole."""

HALVINGS = 30

Cases = Callable[[Model, IntArray | None, Budget], tuple[IntArray | None, float]]
"""(a model, a plan of it, work) -> (the best plan found, a bound)."""


def combine(relaxation: Relaxation, search: Search, cases: Cases, budget: Budget) -> None:
    """Combine plans that message passing met, the cheapest at its multipliers, and the best plan; what is better is offered.

    Where that is too much to be searched exactly, it is divided into cases, with what costs little more.
    """
    ascent = relaxation.ascent
    for count in COUNTS:
        plans = ascent.bundle.plans(ascent.multipliers, count)
        if ascent.plan is not None:
            plans.append(ascent.plan)
        if not plans or budget.spent or relaxation.bound >= relaxation.cutoff:
            return
        if not _combined(relaxation, plans, search, budget.part(WORK)):
            _by_cases(relaxation, plans, cases, budget.part(WORK))
            return


def _by_cases(relaxation: Relaxation, plans: Sequence[IntArray], cases: Cases, budget: Budget) -> None:
    """Search the states that plans have, and others of little excess, by cases."""
    ascent = relaxation.ascent
    states = _nearby(ascent, plans)
    if sum(map(len, states)) > MOST_LEFT * len(ascent.sweeper.theta):
        return
    model, undo = keep_states(replace(ascent.model, prices=ascent.multipliers), states)
    plan = ascent.plan
    start = None if plan is None else np.asarray([int(np.searchsorted(left, x)) for left, x in zip(states, plan, strict=True)])
    found, _ = cases(model, start, budget)
    if found is not None:
        relaxation.take(undo(found))


def _nearby(ascent: Ascent, plans: Sequence[IntArray]) -> list[IntArray]:
    """The states of plans, and those of less excess than a limit, the greatest power of two times the gap that leaves few enough."""
    sweeper = ascent.sweeper
    offset, ends = sweeper.offset, sweeper.wiring.ends
    excess, bound = excess_of(ascent)
    most = ascent.cutoff - bound if np.isfinite(ascent.cutoff) else float(excess[np.isfinite(excess)].max(initial=1.0))
    kept = np.zeros(len(excess), dtype=np.bool_)
    for _ in range(HALVINGS):
        kept = excess < most
        for plan in plans:
            kept[offset[:-1] + plan] = True
        count = np.add.reduceat(kept.astype(np.int64), offset[:-1])
        if (count[ends[0]] * count[ends[1]]).sum() <= NEARBY * sweeper.splits.own[-1]:
            break
        most /= 2
    return [np.flatnonzero(kept[low:high]) for low, high in pairwise(offset)]


def _combined(relaxation: Relaxation, plans: Sequence[IntArray], search: Search, budget: Budget) -> bool:
    """Search the states that some plans have; whether that was small enough."""
    model = relaxation.ascent.model
    states = [np.unique(column) for column in np.stack(plans, axis=1)]
    smaller, undo = keep_states(replace(model, prices=relaxation.ascent.multipliers), states)
    try:
        left = Relaxation(smaller, None, budget)
        for _ in range(PAIRS):
            left.ascent.pair()
        tables, back = left.below(relaxation.cutoff)
        if tables.entries > ENTRIES or too_large(reduce(tables)[0], budget):
            return False
        found, _ = search(tables, relaxation.value, budget)
    except Exhausted:
        return True
    if found is not None:
        relaxation.take(undo(back(found)))
    return True
