"""Core problems: the least cost of a state, plans from few states, and searches that start with a core."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, solve
from fxshard.solver.bounds.pruning import excess_of
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model
from fxshard.solver.search import core_problem as core
from fxshard.solver.search.core_problem import search_core
from tests.solver.problems import brute_force, grid, integer_model, plans, with_transfers


def best_of(model: Model) -> tuple[IntArray | None, float]:
    """The cheapest choices and their cost, by enumeration."""
    best = min(plans(model), key=model.evaluate)
    return best, model.evaluate(best)


@given(with_transfers(most=4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_excess_of_a_state_bounds_every_plan_with_it(problem: PlacementProblem, sweeps: int) -> None:
    assume(np.isfinite(brute_force(problem)))
    relaxation = Relaxation(integer_model(problem), None, Budget())
    relaxation.begin(sweeps)
    ascent = relaxation.ascent
    (excess, bound), offset = excess_of(ascent), ascent.sweeper.offset
    for plan in plans(ascent.model):
        assert all(bound + excess[offset[:-1] + plan] <= ascent.model.evaluate(plan))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as large, and its core is small."""
    monkeypatch.setattr(core, "LARGE", 0)
    monkeypatch.setattr(core, "PARTS", (0.2, 0.4))


@pytest.mark.usefixtures("large")
@given(with_transfers(most=5))
@settings(max_examples=80, deadline=None)
def test_a_search_that_starts_with_a_core_finds_the_optimum(problem: PlacementProblem) -> None:
    optimum = brute_force(problem)
    if np.isfinite(optimum):
        solution = solve(problem)
        assert solution.objective == pytest.approx(optimum, rel=1e-9) and solution.proven


@pytest.mark.usefixtures("large")
def test_the_plan_of_a_core_is_a_plan_of_the_whole() -> None:
    found = 0
    for seed in range(30):
        relaxation = Relaxation(integer_model(grid(2, 3, 4, seed, transfers=True, integers=True)), None, Budget())
        relaxation.begin(1)
        seen: list[float] = []

        def search(model: Model, start: IntArray | None, budget: Budget) -> tuple[IntArray | None, float]:
            assert start is not None and np.isfinite(model.evaluate(start))
            choices, cost = best_of(model)
            seen.append(cost)  # noqa: B023
            return choices, cost

        search_core(relaxation, search, Budget(), 0.2)
        if seen:
            found += 1
            assert relaxation.choices is not None and relaxation.value <= seen[0]
            assert relaxation.model.evaluate(relaxation.choices) == relaxation.value
    assert found > 3


def test_the_states_left_below_a_plan_contain_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """After few sweeps, for plans that cost a little more than the best: states left out are in no better plan."""
    monkeypatch.setattr(core, "MOST_LEFT", 0.9)
    narrowed = 0
    for seed in range(25):
        model = integer_model(grid(2, 2, 4, seed, transfers=True, integers=True))
        every = sorted(plans(model), key=model.evaluate)
        for rank in (1, 2, 4, 8, 16):
            relaxation = Relaxation(model, every[rank], Budget())
            relaxation.begin(20)
            if core.search_remaining(relaxation, every[rank], lambda model, start, budget: best_of(model), Budget()):
                narrowed += 1
                assert relaxation.value == model.evaluate(every[0])
                assert relaxation.value - model.grain < relaxation.bound <= relaxation.value
    assert narrowed > 80
