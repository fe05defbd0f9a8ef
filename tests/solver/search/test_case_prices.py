"""Search by cases with limits: multipliers for each case, bounds of 0, and when a search ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import Live, PlacementProblem, Row, Transfer, solve
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model
from fxshard.solver.search import branching, combining
from fxshard.solver.search.branching import Branching
from tests.solver.problems import brute_force, integer_model, optimum, plans, with_rows


def whole_or_cut(sizes: list[float], limit: float, paid: float = 1.0) -> PlacementProblem:
    """A knapsack: a weight is replicated at no cost, or sharded and gathered by its reader at a cost, within a memory limit."""
    cut = np.array([0, 1])
    costs = (np.zeros(2),) * len(sizes) + (np.zeros(1),) * len(sizes)
    readers = [(len(sizes) + i, np.array([0])) for i in range(len(sizes))]
    gathered = [np.array([[0.0, 0.0], [paid * size, 0.0]]) for size in sizes]
    transfers = tuple(Transfer(i, cut, (readers[i],), gathered[i]) for i in range(len(sizes)))
    lives = tuple(Live(0, 2, np.array([size, size / 8]), node=i) for i, size in enumerate(sizes))
    return PlacementProblem(costs, transfers=transfers, lives=lives, usage_limit=limit)


def search_none(model: Model, known: float, budget: Budget) -> tuple[None, float]:
    """Gives up every subproblem."""
    return None, -np.inf


def test_a_bound_of_zero_is_raised() -> None:
    """Without the limit everything is free, so that the first bound is 0 and only plans tell the scale of costs."""
    problem = whole_or_cut([3e6, 5e6, 7e6, 11e6, 13e6, 17e6, 19e6, 23e6], 50e6)
    relaxation = Relaxation(integer_model(problem), None, Budget())
    relaxation.run()
    assert 0.9 * relaxation.value < relaxation.bound <= relaxation.value
    solution = solve(problem)
    assert solution.proven and solution.objective == pytest.approx(brute_force(problem))


def test_each_case_has_multipliers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the multipliers of the whole problem no choice of a knapsack raises the bound, and every plan must be tried."""
    monkeypatch.setattr(branching, "SMALL", 0)
    monkeypatch.setattr(branching, "AIMED", 0)
    sizes = [float(1000 + 10 * k) for k in range(8)]
    model = integer_model(whole_or_cut(sizes, 4500.0))

    def divided() -> int:
        relaxation = Relaxation(model, None, Budget())
        relaxation.run()
        cases = Branching(relaxation, search_none, Budget(work_limit=1e6))
        cases.run()
        assert cases.bound >= relaxation.cutoff
        return cases.count

    with_prices = divided()
    monkeypatch.setattr(branching, "STEPS", 0)
    assert with_prices < 0.6 * divided()


def test_restoring_a_state_restores_its_multipliers() -> None:
    """Costs at the multipliers, without the term of the limit subtracted, would give a bound above the optimum."""
    model = integer_model(whole_or_cut([3e6, 5e6, 7e6, 11e6, 13e6, 17e6, 19e6, 23e6], 50e6))
    relaxation = Relaxation(model, None, Budget())
    relaxation.run()
    ascent, best = relaxation.ascent, optimum(model)
    state = ascent.state()
    assert (ascent.multipliers > 0).any() and ascent.pair() <= best
    ascent.set_prices(np.zeros(len(ascent.multipliers)))
    ascent.restore(state)
    assert 0.5 * best < ascent.pair() <= best


@settings(max_examples=120, deadline=None)
@given(with_rows(memory=True), st.integers(0, 3), st.sampled_from([None, 3000, 100_000]))
def test_bounds_of_cases_are_valid(problem: PlacementProblem, steps: int, work: int | None) -> None:
    """By enumeration, wherever the search ends. It starts from the dearest plan."""
    model = integer_model(problem)
    every = sorted(plans(model), key=model.evaluate)
    if not every:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branching, "STEPS", steps)
        patch.setattr(branching, "SMALL", 0)
        patch.setattr(branching, "AIMED", 0)
        budget = Budget(work_limit=work)
        try:
            relaxation = Relaxation(model, every[-1], budget)
        except Exhausted:
            return
        relaxation.run()
        cases = Branching(relaxation, search_none, budget)
        cases.run()
    best = model.evaluate(every[0])
    soft = 2 * int(np.isfinite(model.slopes).sum())  # what rounding may add, as `quantise` says
    assert min(cases.bound, relaxation.cutoff) <= best + soft and best <= relaxation.value
    if not budget.spent:
        assert relaxation.value <= best + model.grain + soft


@settings(max_examples=60, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_cases_search_what_combined_plans_leave(problem: PlacementProblem) -> None:
    """Finds the optimum although no subproblem is small enough for exact search."""
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combining, "ENTRIES", 0)
        if np.isfinite(best):
            assert solve(problem).objective == pytest.approx(best, rel=1e-9)


def ladder(count: int, seed: int) -> PlacementProblem:
    """Values passed on in three layouts, with a row that limits the bytes of changes: only cases close the gap."""
    rng = np.random.default_rng(seed)
    costs = tuple(rng.integers(0, 50, 3) * 1e4 for _ in range(count))
    prices = np.array([[0.0, 2e5, 3e5], [2e5, 0.0, 2e5], [3e5, 2e5, 0.0]])
    layouts = np.arange(3)
    transfers = tuple(Transfer(i, layouts, ((j, layouts),), prices) for i in range(count) for j in (i + 1, i + 5) if j < count)
    sent = tuple((index, prices / 1e5) for index in range(len(transfers)))
    return PlacementProblem(costs, transfers=transfers, rows=(Row(3.0, transfers=sent),))


def test_a_search_with_little_progress_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when twice the work closed too little of the gap, reports that it is cut, and is deterministic."""
    monkeypatch.setattr(branching, "SMALL", 0)
    monkeypatch.setattr(branching, "AIMED", 0)
    monkeypatch.setattr(branching, "SMALL_GAP", 0.0)
    monkeypatch.setattr(branching, "PROOF_WORK", 1e4)
    monkeypatch.setattr(branching, "WORTH", 0.0)
    problem = whole_or_cut([float(1000 + 7 * k) for k in range(24)], 14000.0)
    first, second = (solve(problem, work_limit=1e12) for _ in range(2))
    assert first == second and problem.feasible(first.choices)
    assert first.cut


@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_limits_transfers(seed: int) -> None:
    problem = ladder(12, seed)
    solution = solve(problem)
    assert solution.proven and solution.objective == pytest.approx(brute_force(problem))
