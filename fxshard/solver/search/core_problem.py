"""Plans of few states: the *core* of a large model, searched as a model of its own.

Where sweeps are dear, they end before messages have settled, and plans read off them mix what cannot be told apart yet. Most states
cost far more than the plan at hand all the same, however the rest is chosen (their *excess*, `pruning`). The states of little excess
and those of the plan are a model so small that message passing settles at once and cases are cheap. What is best there need not be
best of all: a core gives plans, never bounds.
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
"""(states,) the excess of each, and the bound that it is above."""

LARGE = 20_000_000
"""Numbers in the tables of message passing from which cores are searched first."""

PAIRS = (20, 10, 10)
"""Pairs of sweeps before cores are searched, and before each time that they are again, as long as that finds better plans."""

PARTS = (0.003, 0.01, 0.03)
"""Pairs of states over all links of a core, in parts of all: each begins from the best plan of those before it."""

WORK, PART_OF_WORK = 5e8, 0.5
"""Table entries that the search of one may touch; what all may take of what is left."""

MOST_LEFT = 0.5
"""Part of all states from which some are as dear as the whole."""

HALVINGS = 30
"""Of the excess that the states nearby have at most."""


def is_large(relaxation: Relaxation) -> bool:
    """Whether a core comes before the rest. Under limits on rows plans are made by their multipliers."""
    return not len(relaxation.model.limits) and relaxation.ascent.sweeper.splits.own[-1] > LARGE


def search_cores(relaxation: Relaxation, search: Cases, budget: Budget, work: float = WORK) -> None:
    """Search cores of growing size, and again with better messages, until they find nothing better. work: for each, in entries."""
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
    """Offer the best plan of a core, if there is one. part, measured: as `nearby`."""
    ascent = relaxation.ascent
    plan = ascent.plan
    if plan is None or ascent.done:
        return
    states = nearby(ascent, [plan], part, measured)
    if sum(map(len, states)) > MOST_LEFT * len(ascent.sweeper.theta):
        return
    found, _ = searched(ascent.model, states, plan, search, budget)
    if found is not None:
        ascent.suggest(found)


def search_left(relaxation: Relaxation, plan: IntArray, search: Cases, budget: Budget) -> bool:
    """Search the states that may be in a better plan, and those of a plan of the model that messages work on, as a model of its own.

    That is a proof too: what is left out is in no plan below the cutoff. Whether the states left were few enough.
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
    found, proven = searched(ascent.model, [np.flatnonzero(kept[low:high]) for low, high in pairwise(offset)], plan, search, budget)
    if found is not None:
        relaxation.take(found)
    relaxation.prove(proven)
    return True


def searched(model: Model, states: list[IntArray], plan: IntArray | None, search: Cases, budget: Budget) -> tuple[IntArray | None, float]:
    """The best of some states of a model, those of a plan among them, if one is known; and a bound on what they allow."""
    smaller, undo = keep_states(model, states)
    start = None if plan is None else np.asarray([int(np.searchsorted(left, x)) for left, x in zip(states, plan, strict=True)])
    found, bound = search(smaller, start, budget)
    return None if found is None else undo(found), bound


def nearby(ascent: Ascent, plans: Sequence[IntArray], part: float, measured: Measured | None = None) -> list[IntArray]:
    """The states of plans, and those of less excess than a limit, the greatest power of two times the gap that leaves few enough.

    part: pairs of states over all links that may be left, in parts of all. Without a plan the limits begin at the greatest excess.
    measured: the excess at any messages, where it is known.
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
