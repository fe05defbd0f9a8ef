"""Cases: bounds and pruning of what is allowed, and a search that ends at the optimum however much it divides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, Transfer, branching, solve
from fxshard.solver.bounds import Ascent
from fxshard.solver.branching import Branching
from fxshard.solver.budget import Budget
from fxshard.solver.infeasible import Exhausted
from fxshard.solver.pruning import find_slacks
from fxshard.solver.relax import Relaxation
from fxshard.solver.solve import search_tables
from tests.solver.problems import brute_force, integer_model, plans, with_transfers


def ring(count: int) -> PlacementProblem:
    """Nodes of two states around an odd ring, each dearer where it is as the one before: half and half of both costs nothing."""
    alike = np.array([[1.0, 0.0], [0.0, 1.0]])
    readers = [((i + 1) % count, np.array([0, 1])) for i in range(count)]
    transfers = [Transfer(i, np.array([0, 1]), (reader,), alike) for i, reader in enumerate(readers)]
    return PlacementProblem((np.zeros(2),) * count, transfers=tuple(transfers))


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is small, nothing is aimed at: all is left to the cases."""
    monkeypatch.setattr(branching, "SMALL", 0)


@pytest.mark.usefixtures("divided")
def test_a_choice_closes_a_ring() -> None:
    solution = solve(ring(7))
    assert solution.objective == 1 and solution.proven
    steps = dict(solution.steps)
    assert steps["message passing"].startswith("bound 0,") and steps["cases"].startswith("1:")


@settings(max_examples=150, deadline=None)
@given(with_transfers(memory=True), st.sampled_from([0, 40]), st.sampled_from([1, 6]), st.sampled_from([0, 2**28]))
def test_cases_end_at_the_optimum(problem: PlacementProblem, small: int, probes: int, saved: int) -> None:
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branching, "SMALL", small)
        patch.setattr(branching, "PROBES", probes)
        patch.setattr(branching, "SAVED_BYTES", saved)
        if np.isfinite(best):
            solution = solve(problem)
            assert solution.objective == pytest.approx(best) and solution.proven


@settings(max_examples=150, deadline=None)
@given(with_transfers(), st.sampled_from([0, 40]))
def test_cases_find_what_nothing_else_looks_for(problem: PlacementProblem, small: int) -> None:
    """From the dearest plan, without a plan decoded on the way."""
    model = integer_model(problem)
    every = sorted(plans(model), key=model.evaluate)
    if not every:
        return
    relaxation = Relaxation(model, every[-1], Budget())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branching, "SMALL", small)
        patch.setattr(Ascent, "decoded", lambda self: None)
        cases = Branching(relaxation, search_tables, Budget())
        cases.run()
    assert relaxation.value == model.evaluate(every[0])
    assert cases.bound >= relaxation.cutoff


@settings(max_examples=80, deadline=None)
@given(with_transfers(), st.integers(0, 3000))
def test_a_search_that_is_cut_promises_no_more_than_the_optimum(problem: PlacementProblem, work: int) -> None:
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branching, "SMALL", 0)
        if np.isfinite(best):
            solution = solve(problem, work_limit=work)
            assert solution.lower_bound <= best * (1 + 1e-12) <= solution.objective * (1 + 2e-12)


@settings(max_examples=120, deadline=None)
@given(with_transfers(memory=True), st.integers(0, 2**32))
def test_what_is_allowed_is_bounded_and_kept(problem: PlacementProblem, seed: int) -> None:
    try:
        relaxation = Relaxation(integer_model(problem), None, Budget())
    except Exhausted:
        return
    relaxation.run()
    ascent, rng = relaxation.ascent, np.random.default_rng(seed)
    sweeper, model = ascent.sweeper, ascent.model
    allowed = rng.random(len(sweeper.theta)) < 0.6
    for node in range(len(model)):
        allowed[sweeper.offset[node] + rng.integers(len(model.costs[node]))] = True
    left = [plan for plan in plans(model) if allowed[sweeper.offset[:-1] + plan].all()]
    costs = sorted(model.evaluate(plan) for plan in left)
    if not costs:
        return
    before = sweeper.state()
    sweeper.allow(allowed)
    bounds = [ascent.pair() for _ in range(5)]
    assert max(bounds) <= costs[0]
    ascent.model = replace(model, cutoff=costs[len(costs) // 2] + 1)
    slacks = find_slacks(ascent, allowed)
    assert slacks.room <= ascent.model.cutoff - bounds[-1]
    for plan in left:
        if model.evaluate(plan) < ascent.model.cutoff:
            assert np.isfinite(slacks.excess[sweeper.offset[:-1] + plan]).all()
    sweeper.restore(before)
    assert all(np.array_equal(a, b) for a, b in zip(before, sweeper.state(), strict=True))
