"""Errors about infeasible problems are true: no allowed plan exists, or the named memory is needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from fxshard.solver import InfeasibleError, PlacementProblem, solve
from tests.solver.problems import brute_force, problems

SAME = np.where(np.eye(2) > 0, 0.0, np.inf)
OTHER = np.where(np.eye(2) > 0, np.inf, 0.0)


def test_odd_cycle_far_from_the_rest() -> None:
    chain = [(i, i + 1) for i in range(30)]
    cycle = [(10, 31), (31, 32), (10, 32)]
    costs = (SAME,) * len(chain) + (OTHER,) * 3
    names = tuple(f"n{i}" for i in range(33))
    problem = PlacementProblem((np.zeros(2),) * 33, tuple(chain + cycle), costs, node_names=names)
    with pytest.raises(InfeasibleError, match="leave no choice") as caught:
        solve(problem)
    assert caught.value.nodes == tuple(range(33))
    assert caught.value.least_usage is None


def test_one_node_without_an_allowed_strategy() -> None:
    costs, names = (np.zeros(2), np.array([np.inf, np.inf])), ("first", "second")
    problem = PlacementProblem(costs, ((0, 1),), (np.zeros((2, 2)),), node_names=names)
    with pytest.raises(InfeasibleError, match="nothing is allowed for second") as caught:
        solve(problem)
    assert caught.value.nodes == (1,)


def test_the_error_names_the_memory_needed() -> None:
    usages = (np.array([8.0, 4.0]), np.array([4.0, 8.0]), np.array([1.0, 2.0]))
    intervals = ((0, 5), (2, 6), (8, 9))
    problem = PlacementProblem((np.zeros(2),) * 3, ((0, 1),), (SAME,), usages, intervals, 11.0)
    with pytest.raises(InfeasibleError, match="11 bytes: the least peak found is 12") as caught:
        solve(problem)
    assert (caught.value.nodes, caught.value.least_usage, caught.value.usage_bound) == ((), 12.0, 12.0)


@settings(max_examples=150)
@given(problems(memory=True, most=5))
def test_what_the_error_says_is_true(problem: PlacementProblem) -> None:
    try:
        solve(problem)
    except InfeasibleError as error:
        if error.nodes:
            assert np.isinf(brute_force(PlacementProblem(problem.node_costs, problem.edges, problem.edge_costs)))
        else:
            assert error.least_usage is not None and error.usage_bound is not None and problem.usage_limit is not None
            assert error.usage_bound <= error.least_usage
            assert problem.usage_limit < error.least_usage
            roomy = PlacementProblem(
                problem.node_costs,
                problem.edges,
                problem.edge_costs,
                problem.usages,
                problem.intervals,
                error.least_usage,
            )
            assert solve(roomy).proven
