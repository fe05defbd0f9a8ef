"""The solver against enumeration of every choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import InfeasibleError, PlacementProblem, Row, Transfer, solve
from tests.solver.problems import brute_force, problems, with_copies, with_rows, with_transfers


def check(problem: PlacementProblem) -> None:
    optimum = brute_force(problem)
    if np.isinf(optimum):
        with pytest.raises(InfeasibleError):
            solve(problem)
        return
    solution = solve(problem)
    assert problem.feasible(solution.choices)
    assert solution.objective == problem.evaluate(solution.choices)
    assert solution.objective == pytest.approx(optimum, rel=1e-9)
    assert solution.proven and solution.gap == 0.0 and not solution.cut
    assert solution.lower_bound == solution.objective


KINDS = {
    "integer costs": (problems(), 75),
    "float costs": (problems(integers=False), 75),
    "memory": (problems(memory=True), 75),
    "memory and float costs": (problems(memory=True, integers=False, most=5), 60),
    "copies": (st.integers(0, 2**32).map(lambda seed: with_copies(np.random.default_rng(seed), ops=4, layouts=2)), 12),
    "transfers": (with_transfers(), 100),
    "transfers, memory and float costs": (with_transfers(memory=True, integers=False, most=4), 75),
    "rows with a price": (with_rows(), 100),
    "rows with a limit": (with_rows(hard=True), 75),
    "rows, lives and float costs": (with_rows(memory=True, integers=False), 75),
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_enumeration(kind: str) -> None:
    strategy, examples = KINDS[kind]
    settings(max_examples=examples, deadline=None)(given(strategy)(check))()


def test_penalties_of_rows_leave_no_gap_where_the_first_plan_is_far_from_the_best() -> None:
    """The scale of integer costs follows from the first plan: here the greedy one pays for a transfer that costs thousands of optima."""
    prices = np.array([[0.0, 228060.0], [416858.0, 0.0]])
    readers = tuple((0, np.array(want)) for want in ([1, 1, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]))
    edges = (np.array([[0.0, 2, 0, 0], [2, 0, 1, 0], [0, 1, 1, 1]]), np.diag([0.0, 1, 0, 2]), np.diag([1.0, 2, 0, 2]))
    check(
        PlacementProblem(
            (np.array([0.0, 2, 1, 2]), np.array([0.0, 2, 2])),
            ((1, 0), (0, 0), (0, 0)),
            edges,
            transfers=(Transfer(1, np.array([0, 1, 1]), readers, prices),),
            rows=(
                Row(10.0, ((0, np.array([3.0, -1, -5, -4])),), (), 0.0),
                Row(-5.0, ((1, np.array([3.0, 2, 8])),), (), 1.0),
                Row(-5.0, ((1, np.array([5.0, 5, 6])),), (), 0.0),
            ),
        )
    )


def test_penalties_of_rows_count_where_no_table_costs_anything() -> None:
    """Half a unit over a limit: the scale of integer costs must not round it to nothing."""
    rows = (Row(1.0, ((0, np.array([2.0, 3.0])),), (), 0.5), Row(1.0, ((1, np.array([1.0, 0.0])),), (), 0.5))
    check(PlacementProblem((np.zeros(2), np.array([0.0, 1.0])), ((0, 1),), (np.zeros((2, 2)),), rows=rows))
