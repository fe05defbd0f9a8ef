"""Portions of a model, and HiGHS below a cutoff: by enumeration, plans that they leave out are never cheaper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, Row, solve
from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.pruning import portion
from fxshard.solver.primal import highs
from fxshard.solver.primal.highs import solve_mip
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.reductions import reduce
from fxshard.solver.search import search
from tests.solver.problems import brute_force, grid, integer_model, optimum, plans, problems, with_rows, without_transfers


@settings(max_examples=100)
@given(st.one_of(problems(memory=True, most=5), with_rows(memory=True, most=5).map(without_transfers)), st.integers(0, 40))
def test_a_portion_has_all_plans_below_its_target(problem: PlacementProblem, pairs: int) -> None:
    try:
        model = reduce(integer_model(problem), rounds=1)[0]
    except Exhausted:
        return
    if not len(model):
        return
    every = {tuple(plan): model.evaluate(plan) for plan in plans(model)}
    top = float(np.median([*every.values(), 100.0])) + 1
    ascent = Ascent(model, Budget(), lambda choices, cost: np.inf)
    ascent.run()
    try:
        left, target = portion(ascent, top, pairs)
    except Exhausted:
        assert all(cost >= top for cost in every.values())
        return
    assert target <= top
    for plan, cost in every.items():
        if cost < target:
            assert left.evaluate(np.asarray(plan)) == cost


@settings(max_examples=80)
@given(problems(memory=True, most=5), st.integers(-3, 3), st.integers(1, 4))
def test_highs_below_a_cutoff(problem: PlacementProblem, above: int, grain: int) -> None:
    model = integer_model(problem)
    best = optimum(model)
    if np.isinf(best):
        return
    model = replace(model, cutoff=best + above, grain=float(grain))
    answer = solve_mip(model, Budget())
    if best < model.cutoff:
        assert answer.choices is not None
        assert model.evaluate(answer.choices) - grain < answer.bound <= best
    else:
        assert answer.bound > model.cutoff - grain


@pytest.mark.parametrize("pairs", [1, 60, 200])
def test_portions_grow_until_the_optimum_is_proven(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is small enough to be searched at once."""
    monkeypatch.setattr(search, "FIRST_PORTION", pairs)
    monkeypatch.setattr(search, "MIP_ENTRIES", 0)
    for seed in (1, 2, 4):
        problem = grid(3, 4, 3, seed, memory=True)
        solution = solve(problem)
        assert solution.proven and any("pairs" in name for name, _ in solution.steps)
        assert solution.objective == pytest.approx(brute_force(problem), rel=1e-9)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_portions_with_limits_that_may_be_exceeded_at_a_price(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FIRST_PORTION", 60)
    monkeypatch.setattr(search, "MIP_ENTRIES", 0)
    problem, rng = grid(3, 4, 3, seed, memory=True), np.random.default_rng(seed)
    weights = tuple((node, rng.integers(-3, 9, 3).astype(float)) for node in range(12))
    problem = replace(problem, rows=(Row(20.0, weights, slope=0.05), Row(-5.0, weights[::2], slope=0.02)))
    solution = solve(problem)
    assert solution.proven and any("pairs" in name for name, _ in solution.steps)
    assert solution.objective == pytest.approx(brute_force(problem), rel=1e-9)


def test_a_portion_too_large_for_the_work_left_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MIP_ENTRIES", 0)
    monkeypatch.setattr(highs, "ITERATIONS", 1e9)
    problem = grid(3, 4, 3, 2, memory=True)
    solution = solve(problem, work_limit=1e9)
    assert solution.cut and not solution.proven
    assert solution.lower_bound < brute_force(problem) <= solution.objective * (1 + 1e-9)
    assert solution == solve(problem, work_limit=1e9)
