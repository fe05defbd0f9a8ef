"""Problems whose memory is known exactly only for complete plans, and otherwise lies between two estimates.

The problem's `lives` overestimate memory: a plan that fits by them fits. The *relaxed* problem is the same with lives that underestimate
memory: a lower bound on its cost holds for every plan that fits. So it is solved first. If its plan does not fit, the difference between
exact and estimated memory is added at the critical times, and it is solved again. If that finds no plan that fits, the problem itself is
solved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fxshard.solver.limits.conflicts import Limits
from fxshard.solver.problem.arrays import FloatArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import InfeasibleError, NoPlanError
from fxshard.solver.problem.problem import PlacementProblem, usage_ceiling
from fxshard.solver.problem.rows import Live
from fxshard.solver.problem.solution import Solution, certify
from fxshard.solver.session import AGAIN_WORK, CLOSED, Allowed, Session, narrowed
from fxshard.solver.solve import solve_within

Counted = Callable[[tuple[int, ...]], FloatArray]
"""Choices -> (times,) exact bytes in use at each time."""

ROUNDS = 2
"""How often the relaxed problem is corrected and solved again, at most."""

RELAXED, ROUND = 0.65, 0.25
"""Fractions of the remaining budget for the relaxed problem, and for each time that it is solved again."""

LEAST_WORK = 2e9
"""Work, in table entries, of finding the least peak by each estimate, where work is limited."""

MATTERS = 0.97
"""Fraction of the limit below which the memory of a plan at a time needs no correction."""

KEPT = 4
"""Number of plans whose exact memory is cached."""

NEAR = 0.04
"""Relative gap at which the relaxed problem's plan is good enough, so that the problem itself is not solved."""


@dataclass(frozen=True)
class Counts:
    """The problem, the relaxed one (same nodes, costs and limit, perhaps more transfers, of price 0), and the exact memory of choices."""

    problem: PlacementProblem
    relaxed: PlacementProblem
    counted: Counted

    def fits(self, choices: tuple[int, ...]) -> bool:
        """Whether the exact memory of a plan is within the limit."""
        assert self.problem.usage_limit is not None
        return float(self.counted(choices).max(initial=0.0)) <= usage_ceiling(self.problem.usage_limit)

    def corrected(self, choices: tuple[int, ...], extra: FloatArray) -> FloatArray:
        """(times,) bytes that make the relaxed problem count the exact memory of these choices at critical times; at least `extra`."""
        held, limit = self.counted(choices), self.problem.usage_limit
        assert limit is not None
        relaxed = self.relaxed.over_time(choices).at(np.arange(len(held)))
        return np.maximum(np.where(held > MATTERS * limit, held - relaxed, 0.0), extra)

    def with_more(self, extra: FloatArray) -> PlacementProblem:
        """The relaxed problem with extra bytes in use at each time."""
        amounts = self.relaxed.node_costs[0].shape
        lives = [Live(t, t + 1, np.full(amounts, bytes_), 0) for t, bytes_ in enumerate(extra) if bytes_ > 0]
        return replace(self.relaxed, lives=(*self.relaxed.lives, *lives))


Solving = Callable[[PlacementProblem, Budget, Sequence[int] | None], Solution]
"""(problem, budget, known choices that fit or None) -> solution."""


class LimitedSession:
    """As `Session`, with exact memory. `solution` is of the problem; `again` forbids states; bounds are those of the relaxed problem."""

    def __init__(self, counts: Counts, budget: Budget | None = None, start: Sequence[int] | None = None, bound: float = -np.inf) -> None:
        """Raises as `solve`: `InfeasibleError` where the relaxed problem is infeasible. The least memory that errors report is exact.

        budget: of all solves together; None: unlimited. bound: a known lower bound on all choices that fit."""
        self.counts = replace(counts, counted=lru_cache(KEPT)(counts.counted))
        self._budget = Budget() if budget is None else budget
        try:
            self._relaxed = Session(counts.relaxed, self._budget.share(RELAXED), start)
        except InfeasibleError as error:
            raise self._missed(error, True, self._budget) from error
        except NoPlanError as error:
            misses = tuple(self._missed(miss, True, self._budget) for miss in error.misses)
            together = error.together if None not in error.together or self._fits_alone(self._budget) else ()
            raise NoPlanError(error.reason, misses, together, error.cut) from error
        self._last = self._relaxed

        def solving(problem: PlacementProblem, part: Budget, known: Sequence[int] | None) -> Solution:
            session = Session(problem, part, start if known is None else known)
            self._last = self._last if problem is counts.problem else session
            return session.solution

        found = self._relaxed.solution
        fitting, self._extra = self._fitting(found, solving, np.zeros(1), self._budget)
        self.solution = self._certified(fitting, max(bound, found.lower_bound))

    def again(self, allowed: Allowed, gap: float = CLOSED, *, deep: bool = True, budget: Budget | None = None) -> Solution:
        """As `Session.again`. The bound is that of the relaxed problem without these states if that was solved, else that of `solution`."""
        budget, last = self._budget.anew() if budget is None else budget, self._last
        try:
            found = last.again(allowed, gap, deep=deep, budget=budget.share(RELAXED))
        except InfeasibleError:
            if last is self._relaxed:
                raise
            found, last = self._relaxed.again(allowed, gap, deep=deep, budget=budget.share(RELAXED)), self._relaxed
        bound = max(self.solution.lower_bound, found.lower_bound if last is self._relaxed else -np.inf)

        def solving(problem: PlacementProblem, part: Budget, known: Sequence[int] | None) -> Solution:
            return solve_within(narrowed(problem, allowed), part, known)

        if not self.counts.fits(found.choices):
            found, _ = self._fitting(found, solving, self._extra, budget.part(AGAIN_WORK), allowed)
        return self._certified(found, bound)

    def _fitting(
        self, found: Solution, solving: Solving, extra: FloatArray, budget: Budget, allowed: Allowed | None = None
    ) -> tuple[Solution, FloatArray]:
        """The best plan that fits, and bytes added to the relaxed problem that `found` solves. Raises `NoPlanError` if there is none.

        `allowed`: the states of nodes to which `solving` is restricted.
        """
        fits, rounds = self.counts.fits(found.choices), 0
        while not fits and rounds < ROUNDS:
            extra, rounds = self.counts.corrected(found.choices, extra), rounds + 1
            try:
                found = solving(self.counts.with_more(extra), budget.share(ROUND), None)
            except (InfeasibleError, NoPlanError):
                break
            fits = self.counts.fits(found.choices)
        if fits and not rounds and found.gap <= NEAR:
            return found, extra
        try:
            surely = solving(self.counts.problem, budget, found.choices if fits else None)
        except (InfeasibleError, NoPlanError) as error:
            return (found if fits else self._least(error, budget, allowed or {})), extra
        fitting = [one for one in (found, surely) if self.counts.fits(one.choices)]
        if not fitting:
            raise NoPlanError("what fits by the estimates exceeds the limit by the exact count", cut=budget.spent)
        return min(fitting, key=lambda one: one.objective), extra

    def _least(self, error: InfeasibleError | NoPlanError, budget: Budget, allowed: Allowed) -> Solution:
        """The choices of least memory where no plan fits by the overestimate; they may still fit exactly. Raises `NoPlanError` if not."""
        misses = (error,) if isinstance(error, InfeasibleError) else error.misses
        exact = [self._missed(miss, False, budget) for miss in misses]
        for miss in exact:
            if miss.row is None and miss.least_choices is not None and self._fits(miss.least_choices, allowed):
                objective = self.counts.problem.evaluate(miss.least_choices)
                if np.isfinite(objective):
                    return certify(miss.least_choices, objective, -np.inf, True, ())
        if isinstance(error, NoPlanError):
            raise NoPlanError(error.reason, tuple(exact), error.together, error.cut) from error
        raise NoPlanError(str(error), tuple(exact)) from error

    def _fits_alone(self, budget: Budget) -> bool:
        """Whether choices are known that fit by the overestimate, and so exactly, if rows do not count."""
        limits = Limits(replace(self.counts.problem, rows=()))
        limits.near(budget.last(LEAST_WORK))
        return not limits.missed()

    def _fits(self, choices: tuple[int, ...], allowed: Allowed) -> bool:
        return self.counts.fits(choices) and all(states[choices[node]] for node, states in allowed.items())

    def _missed(self, error: InfeasibleError, of_relaxed: bool, budget: Budget) -> InfeasibleError:
        """A memory error with exact numbers: the least exact peak of choices found by either estimate, and the relaxed problem's bound.

        of_relaxed: whether `error` comes from the relaxed problem. Other errors are returned unchanged."""
        if error.least_usage is None or error.row is not None:
            return error
        last = budget.last(2 * LEAST_WORK)
        larger = _least_usage(self.counts.problem, last.share(0.5))
        relaxed = (
            error if of_relaxed and not error.cut else _least_usage(self.counts.relaxed, last)
        )  # the least is the same under any limit
        plans = [one.least_choices for one in (error, larger, relaxed) if one.least_choices is not None]
        if not plans:
            return error
        least, choices = min((float(self.counts.counted(plan).max(initial=0.0)), plan) for plan in plans)
        bound = max(relaxed.usage_bound or 0.0, (error.usage_bound or 0.0) if of_relaxed else 0.0)
        return InfeasibleError(f"the least peak found is {least:.17g}, and none is below {bound:.17g}", (), least, bound, None, choices)

    @staticmethod
    def _certified(found: Solution, bound: float) -> Solution:
        """The solution with this bound, marked `cut` unless the bound proves it: the search ended although the estimates still differ."""
        return certify(found.choices, found.objective, min(bound, found.objective), True, found.steps)


def _least_usage(problem: PlacementProblem, budget: Budget) -> InfeasibleError:
    """The least peak memory of any allowed choices, as an error that reports it."""
    return Limits(replace(problem, rows=(), usage_limit=0.0)).least_usage(budget)
