"""Problems where message passing finds no plan that fits: repair, proofs and search, against enumeration."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from fxshard.solver import InfeasibleError, NoPlanError, PlacementProblem, solve
from fxshard.solver.bounds import bounds
from fxshard.solver.limits.conflicts import Limits
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.rows import Live, Row
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
def test_limits_reported_as_impossible_are(problem: PlacementProblem) -> None:
    limits = Limits(problem)
    starts, impossible = limits.near(Budget())
    if plans(model_of(problem)):
        assert not impossible
    assert all(len(choices) == len(problem) for choices in starts)
    if limits.together():
        assert all(np.isfinite(brute_force(one)) for _, one in limits._every) and limits.summary().endswith("can be met alone")


@pytest.mark.parametrize("transfers", [False, True])
def test_without_work_there_is_still_a_plan_at_the_least_memory(transfers: bool) -> None:
    """The limit is the least possible peak and no search is allowed: repair from the least excess finds a plan that fits."""
    for seed in range(4):
        free = replace(grid(3, 3, 3, seed, memory=True, transfers=transfers), usage_limit=None)
        least = min(free.peak(plan) for plan in plans(model_of(free)))
        problem = replace(free, usage_limit=least)
        solution = solve(problem, work_limit=0)
        assert problem.feasible(solution.choices)
        assert solution.lower_bound <= brute_force(problem) <= solution.objective


@settings(max_examples=30, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_without_work_the_answer_is_still_right(problem: PlacementProblem) -> None:
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


SOLVE = sys.modules[solve.__module__]


def no_search(*_: object, **__: object) -> tuple[None, float]:
    return None, -np.inf


@pytest.mark.parametrize("transfers", [False, True])
def test_a_search_that_finds_nothing_before_its_end_is_followed_by_repair(transfers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for search in ("search_by_cases", "search_tables"):
        monkeypatch.setattr(SOLVE, search, no_search)
    monkeypatch.setattr(SOLVE, "greedy", lambda _: None)
    for seed in range(4):
        free = replace(grid(3, 3, 3, seed, memory=True, transfers=transfers), usage_limit=None)
        problem = replace(free, usage_limit=min(free.peak(plan) for plan in plans(model_of(free))))
        assert problem.feasible(solve(problem).choices)


def test_limits_that_are_met_one_by_one_only_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice, of a byte of memory or of two in the row; without a search, nobody proves that nothing is left."""
    monkeypatch.setattr(SOLVE, "search_tables", no_search)
    row = Row(1.0, ((0, np.array([0.0, 2.0])),), name="sent")
    problem = PlacementProblem((np.array([0.0, 1.0]),), (), (), usage_limit=0, lives=(Live(0, 1, np.array([1.0, 0.0]), 0),), rows=(row,))
    with pytest.raises(NoPlanError, match="too large to search exactly; each of 0 bytes and sent of 1 can be met alone") as raised:
        solve(problem)
    assert raised.value.together == (None, "sent") and not raised.value.cut
