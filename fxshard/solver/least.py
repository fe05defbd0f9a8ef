"""How little the fullest row can be: the least that is found, and a bound that is a proof.

    min_x max_t (usage_t(x) - limit_t)  =  max over lambda >= 0 that add up to 1 of  min_x lambda . (usage(x) - limit)      (at most)

What costs nothing leaves message passing free to fill all rows without a multiplier, and the planes of such plans say little. So
multipliers are searched for with costs as they are, but small beside what a limit is exceeded by; the bound itself is found
at those multipliers with all costs 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .arrays import FloatArray, IntArray
from .bounds import Ascent
from .budget import Budget
from .bundle import greatest
from .infeasible import Exhausted
from .local_search import Polish, greedy
from .model import Model, Undo, from_problem
from .problem import PlacementProblem
from .reductions import reduce
from .reductions.arc_consistency import ArcConsistency
from .reductions.memory import largest, least
from .relax import Relaxation
from .scaling import SPAN_BITS, coarsen, quantise

COST_BITS = 22
"""The spread of costs, of the 2^SPAN_BITS that what exceeds a limit may cost in all."""

STEPS = 10
PAIRS = 40
"""Multipliers that are tried at most, and pairs of sweeps that bound them."""

NEAR = 0.005
"""A plan this near to its bound, relatively, is near enough."""

AIMS = (0.1, 0.3, 0.6)
"""Parts of what is between bound and least found that repair aims at."""


@dataclass(frozen=True)
class Least:
    """found: the least of the greatest excess over a limit, of `choices` (None: no allowed ones are known); none is below `bound`."""

    found: float
    bound: float
    choices: IntArray | None


def least_excess(problem: PlacementProblem, budget: Budget) -> Least:
    """By how much the limits of a problem are exceeded at least, negative where they need not be reached.

    Ends as soon as choices are found that keep within them. Raises `Exhausted` where it is noticed that
    nothing is allowed at all; otherwise no choices are found then.
    """
    raw = from_problem(problem)
    allowed, undo, _ = reduce(raw, (ArcConsistency(),), 1)
    shift = max(0.0, float((least(allowed) - raw.limits).max(initial=0.0)))
    raised = replace(raw, limits=raw.limits + shift)
    best = _Best(raised, shift, float((least(allowed) - raised.limits).max(initial=-np.inf)))
    first = greedy(raw)
    if first is not None:
        best.offer(first)
    if len(raw.limits) and best.least.found > 0:
        model = coarsen(quantise(replace(allowed, limits=raised.limits))[0], 2.0 ** (COST_BITS - SPAN_BITS))
        _search(Relaxation(model, None, budget), undo, best, budget)
    if best.least.bound == np.inf:  # message passing proved it
        raise Exhausted
    return best.least


class _Best:
    """What is known; excess is counted from limits that were raised by `shift`, of which it is certain that it is exceeded."""

    def __init__(self, model: Model, shift: float, bound: float) -> None:
        self.model, self._shift, self.bound = model, shift, bound
        self.found = np.inf
        self.choices: IntArray | None = None

    def offer(self, choices: IntArray) -> None:
        """Keep choices if they exceed less and are allowed."""
        excess = float((self.model.usage(choices) - self.model.limits).max(initial=-np.inf))
        if excess < self.found and np.isfinite(self.model.linear(choices)):
            self.found, self.choices = excess, choices

    @property
    def least(self) -> Least:
        """With the limits as they were."""
        return Least(self.found + self._shift, self.bound + self._shift, self.choices)


def _search(relaxation: Relaxation, undo: Undo, best: _Best, budget: Budget) -> None:
    """Plans and bounds at the multipliers, adding up to `most`, that the planes of the plans met suggest."""
    ascent = relaxation.ascent
    model = ascent.model

    def offer(choices: IntArray) -> None:
        best.offer(undo(relaxation.undo(choices)))

    if not len(model.limits):  # nothing can exceed them
        plan = ascent.settle()
        if plan is not None:
            offer(plan)
        return
    most = float(2.0 ** np.floor(SPAN_BITS - 1 - np.log2(max(1.0, float(largest(model).max())))))
    near = NEAR * float(np.abs(best.model.limits).max())
    free = Ascent(coarsen(model, 0.0), budget, lambda choices, cost: np.inf)
    multipliers = np.zeros(len(model.limits))
    multipliers[int((least(model) - model.limits).argmax())] = most
    planes: list[tuple[float, FloatArray]] = []

    def bounded(tried: FloatArray) -> None:
        total = float(tried.sum())
        if total > 0:  # a bound that is negative must not be divided by more than the multipliers add up to
            bound = free.evaluate(tried, PAIRS, most * near / 10)[0]
            best.bound = max(best.bound, bound / (most if bound > 0 else total))

    bounded(multipliers)
    for _ in range(STEPS):
        bound, plan, cost = ascent.evaluate(multipliers, PAIRS, most * near / 10)
        if plan is not None:
            excess = ascent.excess(plan)
            planes.append((min(bound, cost) - float(ascent.multipliers @ excess), excess))
            offer(plan)
            _repair(Polish(model, plan, budget), best, offer)
        if budget.spent or best.least.found <= 0 or plan is None:
            break
        found = greatest(planes, multipliers, 2 * most, np.full(len(multipliers), np.inf), most)
        if found is None or found[1] - ascent.bound <= most * near / 10:
            break
        multipliers = found[0]
    if best.least.found > 0:
        bounded(ascent.best_multipliers)


def _repair(polish: Polish, best: _Best, offer: Callable[[IntArray], None]) -> None:
    """Change choices until they exceed the limits by less than the best."""
    choices, room = polish.choices.copy(), polish.room.copy()
    for part in AIMS:
        polish = Polish(polish.model, choices, polish.budget)
        polish.room = room + best.bound + part * (best.found - best.bound)
        if polish.repair():
            offer(polish.choices)
            return
