"""Combine plans: find the best plan in which every node has the state that it has in one of several known plans.

At the best multipliers of a limit several plans have the same Lagrangian cost; some exceed the limit and some do not. A good plan that
fits mixes parts of both kinds. With few states per node this is a small problem, solved exactly (crossover in genetic algorithms, path
relinking for two plans; for mixed-integer programs: Rothberg, "An evolutionary algorithm for polishing mixed integer programming
solutions", 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.primal.highs import too_large
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import keep_states
from fxshard.solver.reductions import reduce
from fxshard.solver.search.branching import Search

COUNTS = (3, 6, 12)
"""Numbers of plans combined, in turn."""

WRITTEN, ENTRIES = 300_000, 30_000
"""The most table entries of a combined problem that is searched exactly, before and after it is reduced: most nodes have two states then,
and a hundredth of the entries is left."""

WORK = 1_000_000_000
"""Work of such a search, in table entries."""

PAIRS = 10
"""Pairs of sweeps on separate links, and again on merged ones where links are merged."""


def combine(relaxation: Relaxation, search: Search, budget: Budget) -> None:
    """Combine the cheapest plans of the cutting planes at the current multipliers with the best plan; better plans are offered.

    Ends where the combined problem is too large to search exactly.
    """
    ascent = relaxation.ascent
    for count in COUNTS:
        plans = ascent.bundle.plans(ascent.multipliers, count)
        if ascent.plan is not None:
            plans.append(ascent.plan)
        if not plans or budget.spent or relaxation.bound >= relaxation.cutoff:
            return
        if not _combined(relaxation, plans, search, budget.part(WORK)) or count >= len(ascent.bundle.planes):
            return


def _combined(relaxation: Relaxation, plans: Sequence[IntArray], search: Search, budget: Budget) -> bool:
    """Search the states of some plans exactly; False if the problem is too large."""
    model = relaxation.ascent.model
    states = [np.unique(column) for column in np.stack(plans, axis=1)]
    smaller, undo = keep_states(replace(model, prices=relaxation.ascent.multipliers), states)
    try:
        left = Relaxation(smaller, None, budget)
        if not _swept(left.ascent) or (left.merge() is not left.ascent and not _swept(left.tight)):
            return True
        tables, back = left.below(relaxation.cutoff)
        if budget.late:
            return True
        if tables.entries > WRITTEN:
            return False
        fewer, unreduced, _ = reduce(tables, budget=budget)
        if fewer.entries > ENTRIES or too_large(fewer, budget):
            return False
        found, _ = search(fewer, relaxation.value, budget)
    except Exhausted:
        return True
    if found is not None:
        relaxation.take(undo(back(unreduced(found))))
    return True


def _swept(ascent: Ascent) -> bool:
    """Sweep in pairs; False if the budget is late before the end."""
    for _ in range(PAIRS):
        ascent.pair()
        if ascent.budget.late:
            return False
    return True
