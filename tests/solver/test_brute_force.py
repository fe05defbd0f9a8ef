"""The solver against enumeration of every choice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import InfeasibleError, PlacementProblem, solve
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
