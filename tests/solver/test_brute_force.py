"""The solver against enumeration of every choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import InfeasibleError, PlacementProblem, solve
from tests.solver.problems import brute_force, problems, with_copies, with_transfers


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


@settings(max_examples=150, deadline=None)
@given(problems())
def test_integer_costs(problem: PlacementProblem) -> None:
    check(problem)


@settings(max_examples=150, deadline=None)
@given(problems(integers=False))
def test_float_costs(problem: PlacementProblem) -> None:
    check(problem)


@settings(max_examples=150, deadline=None)
@given(problems(memory=True))
def test_memory(problem: PlacementProblem) -> None:
    check(problem)


@settings(max_examples=100, deadline=None)
@given(problems(memory=True, integers=False, most=5))
def test_memory_and_float_costs(problem: PlacementProblem) -> None:
    check(problem)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_copies(seed: int) -> None:
    check(with_copies(np.random.default_rng(seed), ops=4, layouts=2))


@settings(max_examples=200, deadline=None)
@given(with_transfers())
def test_transfers(problem: PlacementProblem) -> None:
    check(problem)


@settings(max_examples=150, deadline=None)
@given(with_transfers(memory=True, integers=False, most=4))
def test_transfers_with_memory_and_float_costs(problem: PlacementProblem) -> None:
    check(problem)
