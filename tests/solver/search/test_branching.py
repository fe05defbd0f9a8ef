"""Search by cases (branch and bound): valid bounds and pruning with states forbidden, and an end at the optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, Transfer, solve
from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.pruning import find_slacks
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model
from fxshard.solver.search import branching
from fxshard.solver.search.branching import Branching
from fxshard.solver.search.case_split import search_tables
from tests.solver.problems import brute_force, integer_model, plans, with_transfers


def ring(count: int) -> PlacementProblem:
    """An odd ring of nodes with two states, where equal neighbours cost 1. The relaxation gives each state half, at no cost."""
    alike = np.array([[1.0, 0.0], [0.0, 1.0]])
    readers = [((i + 1) % count, np.array([0, 1])) for i in range(count)]
    transfers = [Transfer(i, np.array([0, 1]), (reader,), alike) for i, reader in enumerate(readers)]
    return PlacementProblem((np.zeros(2),) * count, transfers=tuple(transfers))


def given_up(model: Model, known: float, budget: Budget) -> tuple[None, float]:
    """A search that runs out of work at once, without a plan or a bound."""
    return None, -np.inf


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """No subproblem is small enough for exact search, and none is aimed at: cases do everything."""
    monkeypatch.setattr(branching, "SMALL", 0)
    monkeypatch.setattr(branching, "AIMED", 0)


@pytest.mark.usefixtures("divided")
def test_fixing_one_node_closes_the_gap_of_a_ring() -> None:
    solution = solve(ring(7))
    assert solution.objective == 1 and solution.proven
    steps = dict(solution.steps)
    assert steps["message passing"].startswith("bound 0,") and steps["cases"].startswith("1:")


@pytest.mark.parametrize(("grain", "aims"), [(5.5, False), (5.25, True)])
def test_low_targets_are_skipped_where_the_gap_is_within_the_grain(grain: float, aims: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of cost 10 whose relaxation costs nothing: plans below 11 - grain are worth finding, which is the gap."""
    problem = ring(7)
    priced = replace(problem, transfers=tuple(replace(one, prices=10 * one.prices) for one in problem.transfers))
    relaxation = Relaxation(replace(integer_model(priced), grain=grain), np.array([0, 1, 0, 1, 0, 1, 0]), Budget())
    relaxation.run()
    assert (relaxation.value, relaxation.bound) == (10, 0)
    cases, targets = Branching(relaxation, given_up, Budget()), []
    monkeypatch.setattr(cases, "_searched", lambda slacks, target, *rest: targets.append(target))
    cases._aim()
    assert bool(targets) is aims


@settings(max_examples=150, deadline=None)
@given(with_transfers(memory=True), st.sampled_from([0, 40]), st.sampled_from([0, 2**28]))
def test_cases_end_at_the_optimum(problem: PlacementProblem, small: int, saved: int) -> None:
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branching, "SMALL", small)
        patch.setattr(branching, "AIMED", small)
        patch.setattr(branching, "SAVED_BYTES", saved)
        if np.isfinite(best):
            solution = solve(problem)
            assert solution.objective == pytest.approx(best) and solution.proven


@settings(max_examples=300, deadline=None)
@given(
    with_transfers(memory=True),
    st.sampled_from([0, 40, 60_000]),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 20_000)),
    st.booleans(),
)
def test_cases_alone_find_the_optimum(problem: PlacementProblem, small: int, able: bool, work: int | None, swept: bool) -> None:
    """They start from the dearest plan, and no plan is decoded. A search that is cut proves no bound above the optimum.

    able: whether small subproblems are searched exactly, or given up at once.
    """
    model = integer_model(problem)
    every = sorted(plans(model), key=model.evaluate)
    if not every:
        return
    best, budget = model.evaluate(every[0]), Budget(work_limit=work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branching, "SMALL", small)
        patch.setattr(branching, "AIMED", small)
        patch.setattr(Ascent, "_try", lambda self, plan: None)
        relaxation = Relaxation(model, every[-1], budget)
        if swept:
            relaxation.run()
        cases = Branching(relaxation, search_tables if able else given_up, budget)
        cases._aim()
        assert min(cases.bound, relaxation.cutoff) <= best
        cases.run()
    assert min(cases.bound, relaxation.cutoff) <= best <= relaxation.value
    if not budget.spent:
        assert relaxation.value == best and cases.bound >= relaxation.cutoff


def test_a_low_target_is_enough_if_the_optimum_is_near_the_bound() -> None:
    """The known plan is much dearer than the optimum, which is 1 above the bound."""
    model = integer_model(ring(7))
    dear = replace(model, costs=[np.array([0.0, 1000.0]) * model.grain, *model.costs[1:]])
    relaxation = Relaxation(dear, np.array([1, 0, 1, 0, 1, 0, 1]), Budget())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ascent, "_try", lambda self, plan: None)
        relaxation.run()
        cases = Branching(relaxation, search_tables, Budget())
        cases.run()
    assert relaxation.value < dear.evaluate(np.array([1, 0, 1, 0, 1, 0, 1])) and cases.count == 0


@settings(max_examples=80, deadline=None)
@given(with_transfers(), st.integers(0, 3000))
def test_the_bound_of_a_search_that_is_cut_is_valid(problem: PlacementProblem, work: int) -> None:
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branching, "SMALL", 0)
        patch.setattr(branching, "AIMED", 0)
        if np.isfinite(best):
            solution = solve(problem, work_limit=work)
            assert solution.lower_bound <= best * (1 + 1e-12) <= solution.objective * (1 + 2e-12)


@settings(max_examples=120, deadline=None)
@given(with_transfers(memory=True), st.integers(0, 2**32))
def test_with_states_forbidden_bounds_are_valid_and_cheaper_plans_stay(problem: PlacementProblem, seed: int) -> None:
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
    cutoff = costs[len(costs) // 2] + 1
    slacks = find_slacks(ascent, cutoff)
    assert slacks.room <= cutoff - bounds[-1]
    assert not np.isfinite(slacks.excess[~allowed]).any()
    for plan in left:
        if model.evaluate(plan) < cutoff:
            assert np.isfinite(slacks.excess[sweeper.offset[:-1] + plan]).all()
    sweeper.restore(before)
    sweeper.allow(allowed)
    assert [ascent.pair() for _ in range(5)] == bounds
