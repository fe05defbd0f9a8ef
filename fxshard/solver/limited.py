"""A problem whose memory is known exactly of whole plans only, and otherwise between two counts.

The lives of the problem count at least what a plan takes: what fits by them fits. Those of its `floor` count at most that: a bound of the
floor is one of every plan that fits. So the floor is solved. Where its plan takes more than the floor says, and does not fit, what it
takes more is added at the times when it matters, and it is solved again; if that finds none that fits, the problem itself is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from .arrays import FloatArray, IntArray
from .budget import Budget
from .conflicts import Limits
from .infeasible import InfeasibleError, NoPlanError
from .problem import PlacementProblem, usage_ceiling
from .rows import Live
from .session import AGAIN_WORK, CLOSED, Allowed, Session, narrowed
from .solution import Solution, certify
from .solve import solve

Counted = Callable[[Sequence[int] | IntArray], FloatArray]
"""Choices -> (times,) bytes in use at every time."""

ROUNDS = 2
"""Problems that are solved after the floor, each with what the plan before took more."""

ROUND_WORK = 2e9
"""Table entries that such a solve may touch, where work is limited."""

LEAST_WORK = 2e9
"""The same for the least memory that a plan takes, by each count."""

MATTERS = 0.97
"""Part of the limit: at times when a plan takes less than that, it does not matter what the floor leaves out."""

NEAR = 0.01
"""Relative gap of a plan that is good enough: the problem itself, whose bounds are better, is not searched for another."""

ROUND_TIME = 0.25
"""Part of what is left of a time limit that one of them may take."""


@dataclass(frozen=True)
class Counts:
    """The problem, its floor (of the same nodes, costs and limit, with further transfers of nothing), and what choices take."""

    problem: PlacementProblem
    floor: PlacementProblem
    counted: Counted

    def fits(self, choices: Sequence[int]) -> bool:
        """Whether a plan keeps to the limit."""
        assert self.problem.usage_limit is not None
        return float(self.counted(choices).max(initial=0.0)) <= usage_ceiling(self.problem.usage_limit)

    def corrected(self, choices: Sequence[int], extra: FloatArray | None) -> FloatArray:
        """(times,) bytes to add to the floor so that it counts these choices as they are where that matters; at least `extra`."""
        held, limit = self.counted(choices), self.problem.usage_limit
        assert limit is not None
        short = np.where(held > MATTERS * limit, held - _usage(self.floor, choices, len(held)), 0.0)
        return np.maximum(short, 0.0 if extra is None else extra)

    def with_more(self, extra: FloatArray) -> PlacementProblem:
        """The floor and so many more bytes at each time."""
        amounts = self.floor.node_costs[0].shape
        lives = [Live(t, t + 1, np.full(amounts, bytes_), 0) for t, bytes_ in enumerate(extra) if bytes_ > 0]
        return replace(self.floor, lives=(*self.floor.lives, *lives))


Solving = Callable[[PlacementProblem, Sequence[int] | None], Solution]
"""Solves one of the problems, from choices that fit if any are known."""


class LimitedSession:
    """As `Session`: `solution` of the problem, `again` of it with states forbidden; bounds are those of the floor."""

    def __init__(
        self,
        counts: Counts,
        time_limit: float | None = None,
        work_limit: float | None = None,
        start: Sequence[int] | None = None,
        bound: float = -np.inf,
    ) -> None:
        """Errors as `solve`: `InfeasibleError` where the floor proves it; the least memory in errors is that of choices as `counted`.

        bound: known before, of all choices that fit."""
        self.counts, self._end = counts, None if time_limit is None else perf_counter() + time_limit
        self._extra: FloatArray | None = None
        self._time_limit = time_limit
        try:
            self._floor = Session(counts.floor, None if time_limit is None else time_limit / 2, work_limit, start)
        except InfeasibleError as error:
            raise self._missed(error, True) from error
        except NoPlanError as error:
            raise NoPlanError(str(error), tuple(self._missed(miss, True) for miss in error.misses)) from error
        self._last = self._floor

        def solved(problem: PlacementProblem, known: Sequence[int] | None) -> Solution:
            part = ROUND_TIME if problem is not counts.problem else 1.0
            work = work_limit if known is None and part == 1.0 else ROUND_WORK
            session = Session(problem, self._share(part), None if work_limit is None else work, start if known is None else known)
            self._last = self._last if problem is counts.problem else session
            return session.solution

        found = self._floor.solution
        self.solution = self._certified(self._fitting(found, solved), max(bound, found.lower_bound))

    def again(self, allowed: Allowed, gap: float = CLOSED, *, deep: bool = True) -> Solution:
        """As `Session.again`; a bound is the floor's for what is allowed where its plan fits, else that without what is forbidden."""
        extra, last = self._extra, self._last
        try:
            found = last.again(allowed, gap, deep=deep)
        except InfeasibleError:
            if last is self._floor:
                raise
            found, last = self._floor.again(allowed, gap, deep=deep), self._floor
        bound = max(self.solution.lower_bound, found.lower_bound if last is self._floor else -np.inf)

        def solved(problem: PlacementProblem, known: Sequence[int] | None) -> Solution:
            return solve(narrowed(problem, allowed), self._time_limit, AGAIN_WORK, known)

        fitting = found if self.counts.fits(found.choices) else self._fitting(found, solved)
        self._extra = extra
        return self._certified(fitting, bound)

    def _fitting(self, found: Solution, solved: Solving) -> Solution:
        """The best plan that fits, from the floor's; raises `NoPlanError` where none is found."""
        for _ in range(ROUNDS):
            if self.counts.fits(found.choices):
                break
            self._extra = self.counts.corrected(found.choices, self._extra)
            try:
                found = solved(self.counts.with_more(self._extra), None)
            except (InfeasibleError, NoPlanError):
                break
        fitting = [found] if self.counts.fits(found.choices) else []
        if fitting and self._extra is None and found.gap <= NEAR:
            return found
        try:
            surely = solved(self.counts.problem, found.choices if fitting else None)
            fitting += [surely] if self.counts.fits(surely.choices) else []
        except (InfeasibleError, NoPlanError) as error:
            return fitting[0] if fitting else self._least(error)
        if not fitting:
            raise NoPlanError("no plan was found that fits, nor a proof that there is none")
        return min(fitting, key=lambda one: one.objective)

    def _least(self, error: InfeasibleError | NoPlanError) -> Solution:
        """The choices that take least where nothing was found that fits by the larger count: they may fit as they are counted."""
        misses = (error,) if isinstance(error, InfeasibleError) else error.misses
        exact = [self._missed(miss, False) for miss in misses]
        for miss in exact:
            if miss.row is None and miss.least_choices is not None and self.counts.fits(miss.least_choices):
                return certify(miss.least_choices, self.counts.problem.evaluate(miss.least_choices), -np.inf, True, ())
        raise NoPlanError(f"no plan was found that fits, nor a proof that there is none: {error}", tuple(exact)) from error

    def _missed(self, error: InfeasibleError, proven: bool) -> InfeasibleError:
        """Where memory is short: the least that choices found by either count take, and the bound of the floor.

        proven: whether the error is the floor's."""
        if error.least_usage is None or error.row is not None:
            return error
        other = self.counts.problem if proven else self.counts.floor
        more = Limits(replace(other, rows=(), usage_limit=0.0)).least_usage(Budget(self._share(1.0), LEAST_WORK))
        plans = [one.least_choices for one in (error, more) if one.least_choices is not None]
        if not plans:
            return error
        least, choices = min((float(self.counts.counted(plan).max()), plan) for plan in plans)
        bound = error.usage_bound if proven else more.usage_bound
        return InfeasibleError(f"the least peak found is {least:.17g}, and none is below {bound:.17g}", (), least, bound, None, choices)

    def _share(self, part: float) -> float | None:
        """Seconds: a part of those that are left."""
        return None if self._end is None else max(0.1, part * (self._end - perf_counter()))

    @staticmethod
    def _certified(found: Solution, bound: float) -> Solution:
        """Cut where it is not proven: the search ended before the counts met."""
        return certify(found.choices, found.objective, min(bound, found.objective), True, found.steps)


def _usage(problem: PlacementProblem, choices: Sequence[int], times: int) -> FloatArray:
    """(times,) bytes in use by the lives of a problem."""
    steps = np.zeros(times + 1)
    for live in problem.all_lives:
        amount = live.total(problem.transfers, choices)
        steps[min(live.lo, times)] += amount
        steps[min(live.hi, times)] -= amount
    return np.cumsum(steps)[:-1]
