"""A time limit is kept by every part of a solve, and what it cuts short stays valid."""

from __future__ import annotations

import numpy as np
import pytest

from fxshard.solver import PlacementProblem, solve
from fxshard.solver.bounds.cutting_planes import greatest
from fxshard.solver.primal.highs import solve_mip
from tests.solver.clocks import Looks, calls_as_seconds
from tests.solver.problems import grid, integer_model

LIMITS = (10_000, 50_000, 90_000, 150_000)

STEP = 16_000
"""Calls of the longest step between two looks at the clock: it writes all transfers of a problem as tables."""


@pytest.mark.parametrize(("memory", "transfers"), [(True, False), (False, True), (True, True)])
def test_a_search_ends_in_time_wherever_it_is_cut(memory: bool, transfers: bool) -> None:
    """Here a second is a call of a function, so that parts that look at the clock too rarely are found on any machine."""
    problem = grid(8, 8, 4, 1, integers=True, memory=memory, transfers=transfers)
    start = [int(usage.argmin()) if usage is not None else 0 for usage in problem.usages]
    assert problem.feasible(start)
    known = solve(problem, start=start, work_limit=1e8).objective
    least = _timed(problem, start, 0.0, known)  # to read the problem and to price its plan
    for limit in LIMITS:
        assert _timed(problem, start, limit, known) <= max(1.05 * limit, least) + STEP


def _timed(problem: PlacementProblem, start: list[int], limit: float, known: float) -> float:
    """The function calls of a solve within a limit; checks that its plan is valid and its bound at most the cost of a known plan."""
    with calls_as_seconds() as clock:
        began = clock()
        solution = solve(problem, time_limit=limit, start=start)
        calls = clock() - began
    assert problem.feasible(solution.choices) and solution.objective == problem.evaluate(solution.choices) <= problem.evaluate(start)
    assert solution.lower_bound <= min(known, solution.objective)
    return calls


def test_highs_ends_in_time() -> None:
    model = integer_model(grid(3, 3, 3, 0, integers=True))
    late = solve_mip(model, Looks(0))
    assert late.choices is None and late.bound == -np.inf
    rng = np.random.default_rng(0)
    planes = [(float(base), rng.normal(size=4000)) for base in rng.normal(size=60)]
    centre, most = np.zeros(4000), np.full(4000, 5.0)
    assert greatest(planes, centre, 1.0, most) is not None
    assert greatest(planes, centre, 1.0, most, seconds=0.0) is None
