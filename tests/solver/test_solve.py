"""Solves are deterministic, valid within limits on work and time, independent of scale, and stable on ties."""

from __future__ import annotations

import numpy as np
import pytest

from fxshard.solver import Live, NoPlanError, PlacementProblem, solve
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import from_problem
from fxshard.solver.solve import _starts
from tests.solver.problems import grid, with_copies


@pytest.mark.parametrize("seed", range(3))
def test_same_input_same_solution(seed: int) -> None:
    problem = with_copies(np.random.default_rng(seed), ops=12, layouts=4)
    assert solve(problem) == solve(problem)


def test_ties_are_broken_the_same_way() -> None:
    problem = PlacementProblem((np.zeros(4),) * 9, tuple((i, i + 1) for i in range(8)), (np.zeros((4, 4)),) * 8)
    assert solve(problem).choices == (0,) * 9


def test_copies_are_paid_once() -> None:
    """One producer in layout 0, two readers that need layout 1: one copy, one payment."""
    needs = np.array([[np.inf], [0.0]])
    paid = np.array([[0.0, 7.0]])
    problem = PlacementProblem((np.zeros(1), np.zeros(2), np.zeros(1), np.zeros(1)), ((0, 1), (1, 2), (1, 3)), (paid, needs, needs))
    assert (solve(problem).objective, solve(problem).choices) == (7.0, (0, 1, 0, 0))


def test_a_work_limit_gives_a_valid_bound_and_always_the_same_plan() -> None:
    problem = grid(7, 7, 6, 0)
    cut, full = solve(problem, work_limit=3e5), solve(problem)
    assert cut.cut and not cut.proven and problem.feasible(cut.choices)
    assert cut.lower_bound <= full.objective <= cut.objective
    assert cut.gap == (cut.objective - cut.lower_bound) / cut.objective
    assert cut == solve(problem, work_limit=3e5)


def test_a_time_limit_gives_the_best_plan_so_far() -> None:
    problem = grid(16, 16, 12, 1)
    solution = solve(problem, time_limit=0.0)
    assert solution.cut and problem.feasible(solution.choices)
    assert solution.lower_bound <= solution.objective


def test_a_start_that_exceeds_a_limit_is_repaired() -> None:
    """Each of ten nodes takes a byte, or costs its number less: three of them must pay, and the first three pay least. Another node starts
    in a worse state, which has nothing to do with the limit."""
    costs = (*(np.array([0.0, 1.0 + k]) for k in range(10)), np.array([0.0, 5.0]))
    problem = PlacementProblem(costs, (), (), usage_limit=7, lives=tuple(Live(0, 1, np.array([1.0, 0.0]), k) for k in range(10)))
    start = [0] * 10 + [1]
    given, repaired = _starts(from_problem(problem), start, Budget())
    assert given is not None and given.tolist() == start
    assert repaired is not None and repaired.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    _, better = _starts(from_problem(problem), [1] * 11, Budget())
    assert better is not None and better.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], "a start that pays more than it must"
    free = (np.array([0.0, 10.0]), np.zeros(2))  # the second gives up its byte for nothing, which saves nothing by itself
    swap = PlacementProblem(free, (), (), usage_limit=1, lives=tuple(Live(0, 1, np.array([1.0, 0.0]), k) for k in range(2)))
    _, swapped = _starts(from_problem(swap), [1, 0], Budget())
    assert swapped is not None and swapped.tolist() == [0, 1], "a start that fits, and that no single change within the limit betters"
    stuck = from_problem(PlacementProblem(costs[:1], (), (), usage_limit=0, lives=(Live(0, 1, np.array([1.0, 2.0]), 0),)))
    assert _starts(stuck, [0], Budget())[1] is None


def test_a_limit_reached_before_any_plan_is_an_error() -> None:
    rng = np.random.default_rng(0)
    differ = np.where(np.eye(3) > 0, np.inf, 0.0)
    pairs = [(i, j) for i in range(60) for j in range(i) if rng.random() < 0.07]
    problem = PlacementProblem((np.zeros(3),) * 60, tuple(pairs), (differ,) * len(pairs))
    try:
        assert problem.feasible(solve(problem, time_limit=0.0).choices)
    except NoPlanError as error:
        assert "limit ended the search" in str(error)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_any_scale_of_costs(scale: float) -> None:
    problem = grid(5, 5, 4, 2)
    scaled = PlacementProblem(tuple(c * scale for c in problem.node_costs), problem.edges, tuple(c * scale for c in problem.edge_costs))
    assert solve(scaled).proven
    assert solve(scaled).objective == pytest.approx(solve(problem).objective * scale, rel=1e-9)


def test_problems_without_a_decision() -> None:
    assert solve(PlacementProblem(())).objective == 0.0
    assert solve(PlacementProblem((np.array([4.0]),))).choices == (0,)


def test_steps_are_names_and_texts() -> None:
    solution = solve(grid(6, 6, 5, 3))
    assert solution.steps[0][0] == "integer costs"
    assert all(isinstance(name, str) and isinstance(what, str) for name, what in solution.steps)
