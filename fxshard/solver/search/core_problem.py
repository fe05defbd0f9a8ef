"""Find plans of a large model by searching its *core*: the states of small excess (`pruning`) and those of the best plan.

Where sweeps are expensive, they end before messages converge, and decoded plans mix states that the messages do not distinguish yet. Yet
most states already have a large excess. The core is so small that message passing converges at once and branch and bound is cheap. Its
optimum need not be that of the whole model: a core gives plans, but no bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.pruning import excess_of
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model, keep_states

Cases = Callable[[Model, IntArray | None, Budget], tuple[IntArray | None, float]]
"""(a model, a plan of it, work) -> (the best plan found, a bound)."""

Measured = tuple[FloatArray, float]
"""((states,) excess, the bound that it is relative to)."""

LARGE = 20_000_000
"""Table entries of message passing above which cores are searched first."""

PAIRS = (20, 10, 10)
"""Pairs of sweeps before each round of core searches; rounds continue while they find better plans."""

PARTS = (0.003, 0.01, 0.03)
"""Sizes of the cores of a round, as fractions of all pairs of states; each search starts from the best plan so far."""

WORK, PART_OF_WORK = 5e8, 0.5
"""Work of one core search, in table entries, and the fraction of the remaining budget for all of them."""

MOST_LEFT = 0.5
"""Fraction of all states above which a core saves too little to be searched."""

HALVINGS = 30
"""The most halvings of the limit on excess."""


def is_large(relaxation: Relaxation) -> bool:
    """Whether cores are searched first. Not for models with limits, whose plans come from the search for multipliers."""
    return not len(relaxation.model.limits) and relaxation.ascent.sweeper.splits.own[-1] > LARGE


def search_cores(relaxation: Relaxation, search: Cases, budget: Budget, work: float = WORK) -> None:
    """Search cores of growing size, and again after more sweeps, until that finds no better plan. work: per core, in table entries."""
    budget = budget.share(PART_OF_WORK)
    for pairs in PAIRS:
        relaxation.ascent.settle(pairs)
        before = relaxation.value
        if relaxation.ascent.plan is None or relaxation.ascent.done:
            return
        measured = excess_of(relaxation.ascent)
        for part in PARTS:
            search_core(relaxation, search, budget.part(work), part, measured)
        if relaxation.value >= before:
            return


def search_core(relaxation: Relaxation, search: Cases, budget: Budget, part: float, measured: Measured | None = None) -> None:
    """Search a core and offer its best plan. part, measured: as in `low_excess_states`."""
    ascent = relaxation.ascent
    plan = ascent.plan
    if plan is None or ascent.done:
        return
    states = low_excess_states(ascent, [plan], part, measured)
    if sum(map(len, states)) > MOST_LEFT * len(ascent.sweeper.theta):
        return
    found, _ = search_restricted(ascent.model, states, plan, search, budget)
    if found is not None:
        ascent.suggest(found)


def search_remaining(relaxation: Relaxation, plan: IntArray, search: Cases, budget: Budget) -> bool:
    """Search the states that a better plan may use, and those of `plan` (of `ascent.model`), as a separate model.

    This also proves a bound, since the other states are in no plan below the cutoff. Returns whether the remaining states were few enough.
    """
    ascent = relaxation.ascent
    excess, bound = excess_of(ascent)
    relaxation.prove(bound)
    if relaxation.bound >= relaxation.cutoff:
        return True
    offset = ascent.sweeper.offset
    kept = excess < relaxation.cutoff - bound
    kept[offset[:-1] + plan] = True
    if kept.sum() > MOST_LEFT * len(kept):
        return False
    found, proven = search_restricted(
        ascent.model, [np.flatnonzero(kept[low:high]) for low, high in pairwise(offset)], plan, search, budget
    )
    if found is not None:
        relaxation.take(found)
    relaxation.prove(proven)
    return True


def search_restricted(
    model: Model, states: list[IntArray], plan: IntArray | None, search: Cases, budget: Budget
) -> tuple[IntArray | None, float]:
    """The best plan of a model restricted to some states per node, and a bound on it; plan: a known one within these states."""
    smaller, undo = keep_states(model, states)
    start = None if plan is None else np.asarray([int(np.searchsorted(left, x)) for left, x in zip(states, plan, strict=True)])
    found, bound = search(smaller, start, budget)
    return None if found is None else undo(found), bound


def low_excess_states(ascent: Ascent, plans: Sequence[IntArray], part: float, measured: Measured | None = None) -> list[IntArray]:
    """Per node the states of some plans and those with an excess below a limit: the gap, halved until few enough pairs remain.

    part: the fraction of all pairs of states over links that may remain. Without a known plan the limit starts at the greatest excess.
    measured: the excess, if already computed.
    """
    sweeper = ascent.sweeper
    offset, ends = sweeper.offset, sweeper.wiring.ends
    excess, bound = excess_of(ascent) if measured is None else measured
    most = ascent.cutoff - bound if np.isfinite(ascent.cutoff) else float(excess[np.isfinite(excess)].max(initial=1.0))
    kept = np.zeros(len(excess), dtype=np.bool_)
    for _ in range(HALVINGS):
        kept = excess < most
        for plan in plans:
            kept[offset[:-1] + plan] = True
        count = np.add.reduceat(kept.astype(np.int64), offset[:-1])
        if (count[ends[0]] * count[ends[1]]).sum() <= part * sweeper.splits.own[-1]:
            break
        most /= 2
    return [np.flatnonzero(kept[low:high]) for low, high in pairwise(offset)]
