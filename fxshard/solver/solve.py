"""Solve a placement problem: scale the costs to integers, search, then certify the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.limits.conflicts import Limits
from fxshard.solver.primal.local_search import Polish, greedy
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import NoPlanError
from fxshard.solver.problem.model import Model, from_problem
from fxshard.solver.problem.problem import PlacementProblem
from fxshard.solver.problem.scaling import Scale, quantise
from fxshard.solver.problem.solution import Solution, certify
from fxshard.solver.search.case_split import search_by_cases, search_tables

LAST_WORK = 2e9
"""Work in table entries for finding a plan that fits after a search that found none."""

MARGIN_ERROR = 1e-6
"""Relative error in comparing a gap with the margin: both are differences of rounded floats."""


def solve(
    problem: PlacementProblem,
    time_limit: float | None = None,
    work_limit: float | None = None,
    start: Sequence[int] | None = None,
) -> Solution:
    """The cheapest allowed choices that fit in memory, with a proven lower bound.

    time_limit: seconds after which the best plan so far is returned, marked `cut`. work_limit: the same in table entries read (10^9 take
    two to six seconds), which gives the same plan on every machine. start: choices known to be good; the search skips anything more
    expensive, and returns them if it finds nothing better. Choices that exceed a limit are repaired, others that are not allowed ignored.
    Raises `InfeasibleError` where there is no plan, `NoPlanError` where a limit ended the search before it found one.
    """
    return solve_within(problem, Budget(time_limit, work_limit), start)


def solve_within(problem: PlacementProblem, budget: Budget, start: Sequence[int] | None = None, keep: Keep | None = None) -> Solution:
    """As `solve`, within a budget. keep: called with the relaxation of a problem with transfers (`session`)."""
    raw = from_problem(problem)
    first = _better(raw, greedy(raw), *_starts(raw, start, budget))
    known = np.inf if first is None else raw.evaluate(first)
    reach = known if keep is None else known + abs(known)
    model, scale = quantise(raw, reach)
    steps = [("integer costs", f"times {scale.factor:g}: {model.describe()}")]
    shown = None if keep is None else (lambda relaxation: keep(relaxation, scale, reach))
    limits = Limits(problem)
    if model.transfers:
        best, bound = search_by_cases(model, first, budget, steps, shown, limits.near)
    else:
        best, bound = search_tables(model, np.inf if first is None else model.evaluate(first), budget, steps, grows=True)
    best, cut = _better(raw, first, best), budget.spent
    if best is None and bound < np.inf:
        best, impossible = _near_limits(raw, limits, budget.last(LAST_WORK) if cut else budget.part(LAST_WORK))
        bound = np.inf if impossible else bound
        steps.append(("least excess over limits", "no plan" if best is None else f"cost {raw.evaluate(best):.17g}"))
    if best is None and bound == np.inf:
        raise limits.explain(budget.last())
    if best is None:
        reason = "the time or work limit ended the search" if cut else "the problem is too large to search exactly"
        raise NoPlanError(reason + limits.summary(), tuple(miss for _, miss in limits.missed()), limits.together(), cut)
    found = _certified(problem, best, max(bound / scale.factor - scale.margin, scale.floor), budget, steps)
    only_rounded = not found.proven and found.objective - found.lower_bound <= (1 + MARGIN_ERROR) * scale.margin
    if only_rounded and found.objective < known and np.isfinite(raw.slopes).any():
        return solve_within(problem, budget, found.choices, keep)  # penalties of rows round; a better first plan allows a finer scale
    return found


Keep = Callable[[Relaxation, Scale, float], None]
"""Receives (a bounded relaxation, the scale of its integer costs, the real cost above which its bounds do not hold)."""


def _near_limits(model: Model, limits: Limits, budget: Budget) -> tuple[IntArray | None, bool]:
    """The best plan that repair makes of the choices that exceed each limit least, if any, and whether the problem is proven infeasible."""
    starts, impossible = limits.near(budget)
    return _better(model, *(Polish(model, choices, budget).run() for choices in starts)), impossible


def _starts(model: Model, start: Sequence[int] | None, budget: Budget) -> tuple[IntArray | None, ...]:
    """The start, and where there are limits also what becomes of it if it is improved as if there were none and then repaired."""
    given = None if start is None else np.asarray(start, dtype=np.int64)
    if given is None or not np.isinf(model.slopes).any() or not np.isfinite(model.evaluate(given)):
        return (given,)
    freely = Polish(model, given, budget)
    freely.room = np.full_like(freely.room, np.inf)
    freely.improve()
    return given, Polish(model, freely.choices, budget).run()


def _certified(problem: PlacementProblem, choices: IntArray, bound: float, budget: Budget, steps: list[tuple[str, str]]) -> Solution:
    """The solution of these choices, priced in the problem's own costs."""
    final = tuple(int(x) for x in choices)
    objective = problem.evaluate(final)
    return certify(final, objective, min(bound, objective), budget.spent, tuple(steps))


def _better(model: Model, *plans: IntArray | None) -> IntArray | None:
    """The cheapest allowed plan that fits, None where there is none."""
    priced = [(model.evaluate(p), p) for p in plans if p is not None]
    return min([one for one in priced if np.isfinite(one[0]) and model.fits(one[1])], key=lambda one: one[0], default=(np.inf, None))[1]
