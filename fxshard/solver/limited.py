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
from .session import CLOSED, Allowed, Session, narrowed
from .solution import Solution, certify
from .solve import solve

Counted = Callable[[Sequence[int] | IntArray], FloatArray]
"""Choices -> (times,) bytes in use at every time."""

ROUNDS = 2
"""Problems that are solved after the floor, each with what the plan before took more."""

ROUND_WORK = 2e9
"""Table entries that such a solve may touch, where work is limited."""

AGAIN_WORK = 1e9
"""The same for an answer."""

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
    """The problem, its floor (of the same nodes, costs and limit), and what a plan takes; arguments of `solve`."""

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


class LimitedSession:
    """As `Session`: `solution` of the problem, `again` of it with states forbidden; bounds are those of the floor."""

    def __init__(
        self, counts: Counts, time_limit: float | None = None, work_limit: float | None = None, start: Sequence[int] | None = None
    ) -> None:
        """Errors as `solve`. An `InfeasibleError` is a proof by the floor, whose count its least choices are measured by."""
        self.counts, self._end = counts, None if time_limit is None else perf_counter() + time_limit
        try:
            self.floor = Session(counts.floor, None if time_limit is None else time_limit / 2, work_limit, start)
        except InfeasibleError as error:
            raise self._missed(error, True) from error
        except NoPlanError as error:
            raise NoPlanError(str(error), tuple(self._missed(miss, True) for miss in error.misses)) from error
        self._last, self._extra, found = self.floor, None, self.floor.solution
        for _ in range(ROUNDS):
            if counts.fits(found.choices):
                break
            self._extra = counts.corrected(found.choices, self._extra)
            try:
                self._last = Session(counts.with_more(self._extra), self._share(ROUND_TIME), self._work(work_limit, ROUND_WORK), start)
            except (InfeasibleError, NoPlanError):
                break
            found = self._last.solution
        if not counts.fits(found.choices):
            self._last = self._surely(work_limit, start)
            found = self._last.solution
        elif self._last is not self.floor or found.gap > NEAR:
            found = self._or_surely(found, self._work(work_limit, ROUND_WORK))
        self.solution = self._certified(found, self.floor.solution.lower_bound, self.floor.solution.cut)

    def again(self, allowed: Allowed, gap: float = CLOSED, *, deep: bool = True) -> Solution:
        """As `Session.again`; a bound is the floor's for what is allowed where its plan fits, else that without what is forbidden."""
        found = self._last.again(allowed, gap, deep=deep)
        bound = found.lower_bound if self._last is self.floor else self.floor.solution.lower_bound
        extra = self._extra
        for _ in range(ROUNDS):
            if self.counts.fits(found.choices):
                return self._certified(found, bound, found.cut)
            extra = self.counts.corrected(found.choices, extra)
            found = solve(narrowed(self.counts.with_more(extra), allowed), None, AGAIN_WORK)
        if not self.counts.fits(found.choices):
            found = solve(narrowed(self.counts.problem, allowed), None, AGAIN_WORK)
        return self._certified(found, bound, found.cut)

    def _surely(self, work_limit: float | None, start: Sequence[int] | None) -> Session:
        """The problem itself solved; that nothing fits by its count is no proof that nothing does."""
        try:
            return Session(self.counts.problem, self._share(1.0), work_limit, start)
        except InfeasibleError as error:
            miss = self._missed(error, False)
            raise NoPlanError(f"no plan was found that fits, nor a proof that there is none: {miss}", (miss,)) from error

    def _or_surely(self, found: Solution, work_limit: float | None) -> Solution:
        """What fits, or what costs less and fits by the problem's own count."""
        try:
            surely = solve(self.counts.problem, self._share(1.0), work_limit, found.choices)
        except (InfeasibleError, NoPlanError):
            return found
        return min(found, surely, key=lambda one: one.objective)

    def _missed(self, error: InfeasibleError, proven: bool) -> InfeasibleError:
        """Where memory is short: the least that choices found by either count take, and the bound of the floor.

        proven: whether the error is the floor's."""
        if error.least_usage is None or error.row is not None:
            return error
        other = self.counts.problem if proven else self.counts.floor
        more = Limits(replace(other, rows=(), usage_limit=0.0)).least_usage(Budget(self._share(1.0), LEAST_WORK))
        plans = [one.least_choices for one in (error, more) if one.least_choices is not None]
        least, choices = min((float(self.counts.counted(plan).max()), plan) for plan in plans)
        bound = error.usage_bound if proven else more.usage_bound
        return InfeasibleError(f"the least peak found is {least:.17g}, and none is below {bound:.17g}", (), least, bound, None, choices)

    def _share(self, part: float) -> float | None:
        """Seconds: a part of those that are left."""
        return None if self._end is None else max(0.1, part * (self._end - perf_counter()))

    @staticmethod
    def _work(asked: float | None, most: float) -> float | None:
        return None if asked is None else min(asked, most)

    @staticmethod
    def _certified(found: Solution, bound: float, cut: bool) -> Solution:
        return certify(found.choices, found.objective, min(bound, found.objective), cut or found.cut, found.steps)


def _usage(problem: PlacementProblem, choices: Sequence[int], times: int) -> FloatArray:
    """(times,) bytes in use by the lives of a problem."""
    steps = np.zeros(times + 1)
    for live in problem.all_lives:
        amount = live.total(problem.transfers, choices)
        steps[min(live.lo, times)] += amount
        steps[min(live.hi, times)] -= amount
    return np.cumsum(steps)[:-1]
