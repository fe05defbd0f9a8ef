"""Where message passing meets no plan that fits: repair from near the limits, proofs, and search, by enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from fxshard.solver import InfeasibleError, NoPlanError, PlacementProblem, solve
from fxshard.solver.bounds import bounds
from fxshard.solver.limits.conflicts import Limits
from fxshard.solver.problem.budget import Budget
from tests.solver.problems import brute_force, grid, plans, with_rows
from tests.solver.problems import integer_model as model_of


@settings(max_examples=100, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_the_optimum_without_a_plan_from_message_passing(problem: PlacementProblem) -> None:
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds.Ascent, "_try", lambda ascent, plan: None)
        if np.isinf(best):
            with pytest.raises(InfeasibleError):
                solve(problem)
        else:
            assert solve(problem).objective == pytest.approx(best, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_limits_that_are_said_to_be_impossible_are(problem: PlacementProblem) -> None:
    starts, impossible = Limits(problem).near(Budget())
    if plans(model_of(problem)):
        assert not impossible
    assert all(len(choices) == len(problem) for choices in starts)


@pytest.mark.parametrize("transfers", [False, True])
def test_a_limit_on_work_leaves_a_plan_at_the_least_memory(transfers: bool) -> None:
    """Nothing less would do, and nothing may be searched: what is repaired from the least excess still fits."""
    for seed in range(4):
        free = replace(grid(3, 3, 3, seed, memory=True, transfers=transfers), usage_limit=None)
        least = min(free.peak(plan) for plan in plans(model_of(free)))
        problem = replace(free, usage_limit=least)
        solution = solve(problem, work_limit=0)
        assert problem.feasible(solution.choices)
        assert solution.lower_bound <= brute_force(problem) <= solution.objective


@settings(max_examples=60, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_a_search_that_may_not_begin_is_right_all_the_same(problem: PlacementProblem) -> None:
    best = brute_force(problem)
    try:
        solution = solve(problem, work_limit=0)
    except InfeasibleError:
        assert np.isinf(best)
    except NoPlanError:
        pass
    else:
        assert problem.feasible(solution.choices)
        assert solution.lower_bound <= best * (1 + 1e-9) <= solution.objective * (1 + 2e-9)
