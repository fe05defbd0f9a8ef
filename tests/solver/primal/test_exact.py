"""HiGHS alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from fxshard.solver import PlacementProblem
from fxshard.solver.primal import highs
from fxshard.solver.primal.highs import solve_mip
from fxshard.solver.problem.budget import Budget
from tests.solver.expanded import expand
from tests.solver.problems import brute_force, grid, integer_model, optimum, problems


@settings(max_examples=60)
@given(problems(memory=True, most=5))
def test_highs(problem: PlacementProblem) -> None:
    model = integer_model(problem)
    answer, best = solve_mip(model, Budget()), optimum(model)
    if np.isinf(best):
        assert answer.choices is None and answer.bound == np.inf
    else:
        assert answer.choices is not None
        assert model.evaluate(answer.choices) == answer.bound == best


def test_several_uses_of_one_node_in_one_row_add_up() -> None:
    """Found on IOPDDL B: merged nodes have overlapping uses, and HiGHS hangs on duplicate entries."""
    usage = np.array([0.0, 2.0])
    problem = PlacementProblem((np.array([5.0, 0.0]),), usages=(usage,), intervals=((0, 2),), usage_limit=3)
    model = integer_model(problem)
    model = replace(model, uses=[model.uses[0] * 2])
    answer = solve_mip(model, Budget())
    assert answer.choices is not None and answer.choices.tolist() == [0]


@pytest.mark.parametrize("nodes", [None, 1.0])
def test_the_bound_of_highs_is_valid_whether_it_ends_or_is_cut(nodes: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers written as edges make the relaxation loose, so that a search cut at its first node ends 1% below the optimum."""
    monkeypatch.setattr(highs, "NODE_WORK", 0.0)
    cut = 0
    for seed in range(10):
        problem = grid(3, 3, 3, seed, memory=True, transfers=True, integers=True)
        model, budget, best = integer_model(expand(problem)), Budget(work_limit=nodes), brute_force(problem)
        answer = solve_mip(model, budget)
        assert 0.98 * best < answer.bound <= best
        if nodes is None:
            assert answer.choices is not None and answer.bound == best == model.evaluate(answer.choices)
        elif answer.bound < best:
            assert budget.spent
            cut += 1
    assert cut or nodes is None
