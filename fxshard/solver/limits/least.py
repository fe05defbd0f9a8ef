"""Find the smallest feasible limit, and a lower bound on it, by minimising the greatest excess as an ordinary cost.

    min_x max_t (usage_t(x) - limit_t)

becomes a placement problem if the excess is a *level* that is chosen and paid for:

    min level(y) + ties(x)     such that     usage_t(x) - level(y) <= limit_t      for every t.

All choices fit at some level, so the search for multipliers always has a plan. At the optimum the multipliers add up to 1, as in the dual
of the first line. The level is encoded in binary digits, one node each. The problem's own costs are ignored. With all costs 0, using a
row whose multiplier is 0 would be free, and plans would fill it; so ties(x) charges a little for all use.

Each round searches the levels between the proven bound and the best value found; the next one subdivides the remaining interval.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.multipliers import RowPrices
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.primal.local_search import Polish, greedy
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, from_problem
from fxshard.solver.problem.problem import PlacementProblem
from fxshard.solver.problem.row_uses import Use
from fxshard.solver.problem.scaling import SPAN_BITS, without_costs
from fxshard.solver.reductions.memory import ConstantMemory, DominatedTimes, largest, least
from fxshard.solver.search.case_split import search_by_cases

DIGITS = 12
"""The number of binary digits of a level."""

TIES = 0.002
"""The largest total charge for use, ties(x), as a fraction of the range of levels of a round."""

FIRST_WORK = 4e8
GROWTH = 2.5
WORK = 3.9e9
"""Work in table entries: of the first round, growth factor per round, and of all rounds together."""

ROUNDS = 8
ENOUGH, NAMED = 1e-5, 0.05
"""The most rounds, and the gaps that are small enough once a round was cut: relative to the rows' sums while choices within the limits may
exist; relative to the usage found once it is proven that there are none, so that it is only named in an error."""

FAR = 0.5
"""The uncertainty of the least usage, as a part of what is missing for sure, at which it is named: the further off a limit is, the less a
closer figure would change what its user does."""

PAIRS = 40
"""Pairs of sweeps that compute the bound of a round's multipliers with all costs 0."""

NEAR = 1e-9
"""Relative gap that counts as rounding."""


@dataclass(frozen=True)
class Least:
    """The least greatest excess over a limit. found: the best value, of `choices` (None: no allowed choices known); bound: a lower bound.

    cut: whether the budget ended the search.
    """

    found: float
    bound: float
    choices: IntArray | None
    cut: bool = False


def least_excess(problem: PlacementProblem, budget: Budget, known: Least | None = None) -> Least:
    """The least greatest excess over the problem's limits; negative where there is room to spare.

    Continues from `known`, and stops as soon as choices within all limits are found. Raises `Exhausted` where the search proves that no
    choice is allowed at all.
    """
    raw = from_problem(problem)
    best = _Best(without_costs(raw), known)
    if known is None:
        best.offer(greedy(raw))
    work, near = budget.part(WORK), NEAR
    for count in range(ROUNDS):
        if best.near(near) or (near == ENOUGH and best.named()) or work.spent:
            break
        part = work.part(FIRST_WORK * GROWTH**count)
        _round(best, part)
        near = ENOUGH if part.spent else near
    return Least(best.found, best.bound, best.choices, budget.spent and not best.near(ENOUGH))


class _Best:
    """The best values so far for a model with all costs 0.

    most: an upper bound on any excess. size: the scale of the rows' sums, for tolerances. multipliers: the best of the last round.
    """

    def __init__(self, model: Model, known: Least | None) -> None:
        self.model = model
        self.most = float((largest(model) - model.limits).max(initial=-np.inf))
        self.size = float(max(np.abs(model.limits).max(initial=0.0), largest(model).max(initial=0.0)))
        self.bound = float((least(model) - model.limits).max(initial=-np.inf))
        self.found, self.choices = np.inf, None if known is None else known.choices
        self.multipliers = np.zeros(len(model.limits))
        if known is not None:
            self.found, self.bound = known.found, max(self.bound, known.bound)

    def offer(self, choices: IntArray | None) -> None:
        """Keep choices that are allowed and have a smaller excess."""
        if choices is not None:
            excess = float((self.model.usage(choices) - self.model.limits).max(initial=-np.inf))
            if excess < self.found and np.isfinite(self.model.linear(choices)):
                self.found, self.choices = excess, choices

    def prove(self, bound: float) -> None:
        """Record a bound, capped at the value found, which it exceeds only by rounding."""
        self.bound = max(self.bound, min(bound, self.found))

    def near(self, part: float) -> bool:
        """Whether the limits are satisfied, or value and bound are within this relative gap."""
        return self.found <= 0 or self.found - self.bound <= part * self.size

    def named(self) -> bool:
        """Whether no choices are within the limits for sure, and the least usage is known well enough to be named."""
        usage = self.found + float(self.model.limits.max(initial=0.0))
        enough = max(NAMED * usage, FAR * self.bound)
        return self.choices is not None and self.bound > NEAR * self.size and self.found - self.bound <= enough


@dataclass(frozen=True)
class _Levels:
    """A model with levels from `low` to `top`; a level costs `factor` times its height above `low`. The last nodes are the digits.

    slack: the most by which a plan's cost may exceed its level, in units of levels. rows: the original indexes of the rows kept.
    """

    model: Model
    low: float
    top: float
    factor: float
    slack: float
    rows: IntArray


def _round(best: _Best, budget: Budget) -> None:
    """Search the levels between the proven bound and the value found."""
    levels = _levels(best, best.bound, best.most if best.choices is None else best.found)
    first = None
    if best.choices is not None:  # starts at level 0; repair raises the level where it cannot free enough otherwise
        first = np.append(best.choices, np.zeros(DIGITS, dtype=np.int64))
        polished = Polish(levels.model, np.append(best.choices, np.ones(DIGITS, dtype=np.int64)), budget).run()
        first = first if polished is None else polished

    def shown(relaxation: Relaxation) -> None:
        multipliers = relaxation.ascent.best_multipliers
        best.prove(_dual(relaxation, levels.top))
        if len(multipliers) == len(levels.rows):
            best.multipliers = np.zeros_like(best.multipliers)
            best.multipliers[levels.rows] = multipliers / levels.factor

    found, bound = search_by_cases(levels.model, first, budget, shown=shown)
    if bound == np.inf or best.bound == np.inf:  # every allowed choice fits at the greatest level
        raise Exhausted
    if found is not None:
        best.offer(found[:-DIGITS])
    proven = levels.low + bound / levels.factor - levels.slack
    if proven > levels.low:
        best.prove(proven)


def _levels(best: _Best, low: float, top: float) -> _Levels:
    """The model with levels from `low` to `top`; all choices with an excess of at most `top` fit."""
    model, top = best.model, top + NEAR * best.size
    rows = len(model.limits)
    factor = float(2.0 ** np.floor(SPAN_BITS - 1 - np.log2(best.size)))
    step = (top - low) / (2**DIGITS - 1)
    amounts = [step * 2**digit for digit in range(DIGITS)]
    digits = [(Use(0, rows, np.asarray([0.0, amount])),) for amount in amounts]  # a digit that is not paid for takes up room
    paid = [np.rint(np.asarray([amount, 0.0]) * factor) for amount in amounts]
    nothing = [np.zeros(2)] * DIGITS
    model = replace(model, costs=[*model.costs, *nothing], uses=[*model.uses, *digits], limits=model.limits + top)
    model = replace(model, prices=np.arange(rows, dtype=np.float64))  # marks the rows, to identify those kept
    for step_ in (ConstantMemory(), DominatedTimes()):
        model, _ = step_.apply(model)
    left = model.prices.astype(np.int64)
    ties = TIES * (top - low)
    room = float(model.limits.sum())
    prices = RowPrices(model)
    model = prices.priced(model, prices.round(np.full(len(model.limits), ties * factor / room if room > 0 else 0.0)))
    model = replace(model, costs=[*model.costs[:-DIGITS], *paid])
    slack = ties + step + DIGITS / factor
    model = replace(model, grain=float(np.ceil(slack * factor)) + 2, prices=best.multipliers[left] * factor)
    return _Levels(model, low, top, factor, slack, left)


def _dual(relaxation: Relaxation, top: float) -> float:
    """The bound on the excess given by a relaxation's best multipliers, with all costs 0."""
    ascent = relaxation.ascent
    multipliers = ascent.memory.round(ascent.best_multipliers)
    total = float(multipliers.sum())
    if total <= 0:
        return -np.inf
    free = Ascent(without_costs(ascent.model), Budget(ascent.budget.seconds_left), lambda choices, cost: np.inf)
    bound, _, _ = free.evaluate(multipliers, PAIRS, total * NEAR)
    return top + bound / total
