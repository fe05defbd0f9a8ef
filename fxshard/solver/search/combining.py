"""Plans combined: each node in a state that it has in some of them, and the best of all such plans searched for exactly.

At the best multipliers of a limit several plans cost the same, some of which exceed it and some of which do not. What fits best takes
some parts of the one and some of the other: few states are left to choose from, so that this is a small problem (crossover in
genetic algorithms, `path relinking' where there are two; in mixed-integer programming Rothberg's "An evolutionary algorithm for
polishing mixed integer programming solutions", 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.primal.highs import too_large
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import keep_states
from fxshard.solver.reductions import reduce
from fxshard.solver.search.branching import Search
from fxshard.solver.search.core_problem import MOST_LEFT, Cases, nearby, searched

COUNTS = (3, 6, 12)
"""Plans that are combined, one after the other."""

ENTRIES = 30_000
"""Table entries up to which the problem of what they leave is searched."""

WORK = 1_000_000_000
"""Entries that such a search may touch."""

PAIRS = 10

NEARBY = 0.03
"""Pairs of states over all links, in parts of all, that are searched by cases: those of the plans, and those of least excess."""


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
    states = nearby(ascent, plans, NEARBY)
    if sum(map(len, states)) > MOST_LEFT * len(ascent.sweeper.theta):
        return
    found, _ = searched(replace(ascent.model, prices=ascent.multipliers), states, ascent.plan, cases, budget)
    if found is not None:
        relaxation.take(found)


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
