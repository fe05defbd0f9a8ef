"""Limits on a model of repeated layers: the plans between which the best multipliers lie, found on the tied model.

A limit is seldom met best by one choice for all layers: some layers save memory, others time. At the best multipliers both kinds cost the
same in the Lagrangian, and all layers of one kind are a plan of the tied model. So cutting planes find both kinds there, cheaply, with
message passing and local search as their oracle. Afterwards `combining` makes a plan of both, layer by layer, and the search of the whole
model goes on from the multipliers.
"""

from __future__ import annotations

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.cutting_planes import Plane, greatest
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.bounds.tied_messages import initialise_from_tied
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.reductions import reduce
from fxshard.solver.reductions.arc_consistency import ArcConsistency
from fxshard.solver.search.tied_model import FEW_LINKS, MOST_CLASSES, classes_of, tie

STEPS, ROUNDS, PAIRS = 10, 10, 10
"""Multipliers tried, rounds at each, and pairs of sweeps in a round, after which plans are decoded."""

SETTLING = 100
"""Pairs of sweeps at the best of these multipliers, before the messages go to the whole model."""

GAIN = 1e-3
"""The search ends when the planes predict a gain below this fraction of the cost."""

RISE, GROWS = 0.3, 4.0
"""Predicted gain of the first step, as a fraction of the cost, and the factor by which steps grow while no plan stops the rise."""

PART = 0.25
"""Fraction of the remaining budget."""


def start_from_tied(relaxation: Relaxation, budget: Budget) -> bool:
    """Give a relaxation with limits the planes, multipliers and messages of its tied model; False where that is not much smaller."""
    ascent, budget = relaxation.ascent, budget.share(PART)
    classes = classes_of(ascent.model, FEW_LINKS)
    if classes.max(initial=-1) >= MOST_CLASSES * len(classes):
        return False
    tied = tie(ascent.model, classes)
    try:
        smaller, undo, _ = reduce(tied.model, (ArcConsistency(),), 1, budget)
    except Exhausted:
        return False
    part = Ascent(smaller, budget, lambda choices, _: relaxation.take(tied.expand(undo(choices))))
    for plane in _planes(part):
        choices = tied.expand(undo(plane.choices))
        ascent.bundle.planes.append(Plane(ascent.model.linear(choices), ascent.excess(choices), True, choices))
    part.set_prices(part.best_multipliers)
    part.prove(SETTLING)
    ascent.set_prices(part.multipliers)
    if [len(costs) for costs in smaller.costs] == [len(costs) for costs in tied.model.costs]:
        initialise_from_tied(part.sweeper, ascent.sweeper, tied.of, tied.links)
        budget.charge(ascent.sweeper.entries)
    return True


def _planes(ascent: Ascent) -> list[Plane]:
    """Planes of plans of low cost in the Lagrangian, for the multipliers that maximise the least of them."""
    planes: list[Plane] = []
    nothing = np.zeros(len(ascent.model.limits))
    multipliers, top, reach = nothing, np.inf, np.inf
    for _ in range(STEPS):
        ascent.set_prices(multipliers)
        plan = _cheapest(ascent)
        if plan is not None:
            planes.append(Plane(ascent.model.linear(plan), ascent.excess(plan), True, plan))
        if not planes or ascent.budget.spent:
            break
        value = min(plane.at(multipliers) for plane in planes)
        if np.isinf(reach):
            reach = RISE * (ascent.scale(value) + 1) / max(1e-9, float(np.abs(planes[0].excess).max(initial=0.0)))
        elif multipliers.sum() >= 0.99 * reach:  # what lies beyond is not known yet
            reach *= GROWS
        elif top - value <= GAIN * ascent.scale(value):
            break
        found = greatest([(p.base, p.excess) for p in planes], nothing, reach, ascent.max_multipliers, ascent.budget.seconds_left)
        if found is None:
            break
        multipliers, top = found
    return planes


def _cheapest(ascent: Ascent) -> IntArray | None:
    """The cheapest plan found in the Lagrangian at the ascent's multipliers, which is also repaired and offered."""
    best, cost = None, np.inf
    for _ in range(ROUNDS):
        ascent.prove(PAIRS)
        for direction in (0, 1):
            plan = ascent.decoded(direction, surely=True)
            if plan is not None:
                plan, priced = ascent.improved(plan)
                if priced < cost:
                    best, cost = plan, priced
        if ascent.done:
            break
    if best is not None:
        ascent.suggest(best)
    return best
