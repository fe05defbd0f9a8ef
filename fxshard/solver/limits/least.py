"""How little the fullest row can be: the least that is found, and a bound that is a proof.

    min_x max_t (usage_t(x) - limit_t)

is a problem of the same kind once what limits are exceeded by is a *level* that is chosen and paid for:

    min level(y) + ties(x)     such that     usage_t(x) - level(y) <= limit_t      for every t.

All choices fit at some level, so that a search for multipliers is never without a plan. At those that balance it the multipliers add up to
1, which is the dual of the first line. The level is in binary digits, a node each. What else choices cost plays no part; but where
nothing costs anything, message passing fills all rows that have no multiplier, so that a little is paid for what is used anywhere.

A round searches the levels between what is proven and what is found; the next one has finer levels between what is left of that.
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
from fxshard.solver.problem.scaling import SPAN_BITS, coarsen
from fxshard.solver.reductions.memory import ConstantMemory, DominatedTimes, largest, least
from fxshard.solver.search.case_split import search_by_cases

DIGITS = 12
"""Binary digits of a level."""

TIES = 0.002
"""What use is paid for at most, in parts of the levels of a round."""

FIRST_WORK = 4e8
GROWTH = 2.5
WORK = 3.9e9
"""Table entries that the first round may touch, how many times those of the one before each further one may, and all of them together."""

ROUNDS = 8
ENOUGH = 1e-5
"""Rounds at most; and the gap, relatively, that is small enough where one was cut."""

PAIRS = 40
"""Pairs of sweeps that bound the multipliers of a round with all costs 0."""

NEAR = 1e-9
"""A plan this near to its bound, relatively, is at it: floats round."""


@dataclass(frozen=True)
class Least:
    """found: the least of the greatest excess over a limit, of `choices` (None: no allowed ones are known); none is below `bound`.

    cut: whether the budget ended before the search did.
    """

    found: float
    bound: float
    choices: IntArray | None
    cut: bool = False


def least_excess(problem: PlacementProblem, budget: Budget, known: Least | None = None) -> Least:
    """By how much the limits of a problem are exceeded at least, negative where they need not be reached.

    Ends as soon as choices are found that keep within them; goes on from what is known. Raises `Exhausted` where it is noticed that
    nothing is allowed at all; otherwise no choices are found then.
    """
    raw = from_problem(problem)
    best = _Best(coarsen(raw, 0.0), known)
    if known is None:
        best.offer(greedy(raw))
    work, near = budget.part(WORK), NEAR
    for count in range(ROUNDS):
        if best.near(near) or work.spent:
            break
        part = work.part(FIRST_WORK * GROWTH**count)
        _round(best, part)
        near = ENOUGH if part.spent else near
    return Least(best.found, best.bound, best.choices, budget.spent and not best.near(ENOUGH))


class _Best:
    """What is known of a model in which nothing costs anything.

    most: what no choices exceed a limit by. size: of the sums of rows, to which floats round. multipliers: the best of the last round.
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
        """Keep choices if they exceed less and are allowed."""
        if choices is not None:
            excess = float((self.model.usage(choices) - self.model.limits).max(initial=-np.inf))
            if excess < self.found and np.isfinite(self.model.linear(choices)):
                self.found, self.choices = excess, choices

    def prove(self, bound: float) -> None:
        """Record a bound; none is above what is found but by rounding."""
        self.bound = max(self.bound, min(bound, self.found))

    def near(self, part: float) -> bool:
        """Whether the limits are kept, or what is found is so near to what is proven, relatively."""
        return self.found <= 0 or self.found - self.bound <= part * self.size


@dataclass(frozen=True)
class _Levels:
    """A model with levels from `low` to `top`, each of which costs `factor` times what it is above `low`; its last nodes are the digits.

    slack: what the cost of a plan may be above its own level, in the units of levels. rows: those of the model before that are left.
    """

    model: Model
    low: float
    top: float
    factor: float
    slack: float
    rows: IntArray


def _round(best: _Best, budget: Budget) -> None:
    """Search the levels between what is proven and what is found."""
    levels = _levels(best, best.bound, best.most if best.choices is None else best.found)
    first = None
    if best.choices is not None:  # from no level at all on, repair pays for one where it frees too little otherwise
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
    if bound == np.inf or best.bound == np.inf:  # at the greatest level all fits
        raise Exhausted
    if found is not None:
        best.offer(found[:-DIGITS])
    proven = levels.low + bound / levels.factor - levels.slack
    if proven > levels.low:
        best.prove(proven)


def _levels(best: _Best, low: float, top: float) -> _Levels:
    """A model of which nothing costs anything, with levels in between; all that keeps to `top` fits."""
    model, top = best.model, top + NEAR * best.size
    rows = len(model.limits)
    factor = float(2.0 ** np.floor(SPAN_BITS - 1 - np.log2(best.size)))
    step = (top - low) / (2**DIGITS - 1)
    amounts = [step * 2**digit for digit in range(DIGITS)]
    digits = [(Use(0, rows, np.asarray([0.0, amount])),) for amount in amounts]  # what is not paid for takes up room
    paid = [np.rint(np.asarray([amount, 0.0]) * factor) for amount in amounts]
    nothing = [np.zeros(2)] * DIGITS
    model = replace(model, costs=[*model.costs, *nothing], uses=[*model.uses, *digits], limits=model.limits + top)
    model = replace(model, prices=np.arange(rows, dtype=np.float64))  # to know which are left
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
    """What is proven by the best multipliers of a relaxation with all costs 0."""
    ascent = relaxation.ascent
    multipliers = ascent.memory.round(ascent.best_multipliers)
    total = float(multipliers.sum())
    if total <= 0:
        return -np.inf
    free = Ascent(coarsen(ascent.model, 0.0), Budget(), lambda choices, cost: np.inf)
    bound, _, _ = free.evaluate(multipliers, PAIRS, total * NEAR)
    return top + bound / total
