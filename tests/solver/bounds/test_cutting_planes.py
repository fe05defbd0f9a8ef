"""Cutting planes and combined plans, against linear programs and enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fxshard.solver import Live, PlacementProblem, Transfer, solve
from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.cutting_planes import greatest
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.limits.least import least_excess
from fxshard.solver.primal.local_search import Polish
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.search.case_split import search_tables
from fxshard.solver.search.combining import combine
from tests.solver.problems import brute_force, integer_model, optimum, with_rows


@settings(max_examples=100)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32))
def test_the_maximum_of_the_least_plane(count: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bases, slopes = rng.normal(size=count) * 100, rng.normal(size=(count, rows)) * 10
    centre, max_multipliers = np.floor(rng.random(rows) * 3), np.full(rows, 5.0)
    reach = 2.0
    moves = np.hstack([np.eye(rows), -np.eye(rows)])  # by how much each multiplier rises or falls
    planes = np.hstack([np.ones((count, 1)), -slopes @ moves])
    limits = np.vstack([planes, np.append(0.0, np.ones(2 * rows))])
    right = np.append(bases + slopes @ centre, reach)
    bounds = [(None, None), *((0.0, 5.0 - c) for c in centre), *((0.0, c) for c in centre)]
    expected = -linprog(np.append(-1.0, np.zeros(2 * rows)), limits, right, bounds=bounds).fun
    found = greatest(list(zip(bases, slopes, strict=True)), centre, reach, max_multipliers)
    if found is None:
        assert not (slopes > 0).any() and not centre.any()
        return
    multipliers, top = found
    assert top == pytest.approx(expected, abs=1e-6 * max(1.0, abs(expected)))
    assert min(bases + slopes @ multipliers) == pytest.approx(top, abs=1e-5 * max(1.0, abs(top)))
    assert (multipliers >= 0).all() and (multipliers <= max_multipliers + 1e-6).all()
    assert np.abs(multipliers - centre).sum() <= reach + 1e-6


@settings(max_examples=100, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_bounds_and_combined_plans(problem: PlacementProblem) -> None:
    model = integer_model(problem)
    try:
        relaxation = Relaxation(model, None, Budget())
    except Exhausted:
        return
    with pytest.MonkeyPatch.context() as patch:  # so that plans come only from combinations
        patch.setattr(Ascent, "_try", lambda ascent, plan: None)
        relaxation.run()
        best = optimum(model)
        assert relaxation.bound <= best
        combine(relaxation, search_tables, Budget())
    assert relaxation.value >= best
    assert relaxation.choices is None or model.fits(relaxation.choices)


def test_a_transfer_without_a_possible_layout_leaves_no_plan() -> None:
    """Each reader alone can be served from some layout of the value, both together from none."""
    prices = np.array([[0.0, 1.0, 0.0], [2.0, 0.0, np.inf], [2.0, 1.0, 0.0]])
    transfer = Transfer(1, np.array([1, 2, 1]), ((0, np.array([1])), (0, np.array([2]))), prices)
    costs = (np.array([2.0]), np.array([1.0, np.inf, 1.0]))
    lives = (Live(3, 6, np.array([4.0, 5.0, 8.0]), node=1),)
    problem = PlacementProblem(costs, (), (), (np.array([8.0]), np.array([2.0, 2.0, 1.0])), (None, None), 0.0, (), (transfer,), lives)
    with pytest.raises(Exhausted):
        least_excess(problem, Budget())


def test_parts_of_two_plans_are_combined() -> None:
    """Six equal nodes can save memory at a price. The best plan saves at three; message passing finds only plans with all or none."""
    costs = tuple(np.array([5e6, 1e7]) for _ in range(6))
    usages = tuple(np.array([10.0, 2.0]) for _ in range(6))
    spans = ((0, 2), (0, 2), (0, 2), (0, 2), (0, 1), (1, 2))
    model = integer_model(PlacementProblem(costs, (), (), usages, spans, 30.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ascent, "_try", lambda ascent, plan: None)
        relaxation = Relaxation(model, None, Budget())
        relaxation.run()
        assert relaxation.choices is None
        combine(relaxation, search_tables, Budget())
    assert relaxation.value == optimum(model) == 45e6


@settings(max_examples=30, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_the_optimum_without_repair(problem: PlacementProblem) -> None:
    """Without repair, plans that fit come only from combinations and searches."""
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Polish, "repair", lambda polish: not len(polish.room) or polish.room.min() >= 0)
        if np.isfinite(best):
            assert solve(problem).objective == pytest.approx(best, rel=1e-9)


def test_a_spent_budget_still_gives_a_bound() -> None:
    """One pair of sweeps always runs."""
    model = integer_model(PlacementProblem((np.array([3.0, 5.0]),)))
    assert Ascent(model, Budget(work_limit=0), lambda choices, cost: np.inf).evaluate(np.zeros(0), 5, 0.0)[0] == 3.0
