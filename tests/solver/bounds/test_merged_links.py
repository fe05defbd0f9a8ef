"""Merged links: the same costs, valid bounds, and higher ones where two nodes have several links."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, Transfer
from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.merged_links import MergedSweeper, worth_merging
from fxshard.solver.bounds.pruning import find_slacks
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, from_problem
from fxshard.solver.search.combining import _combined
from tests.solver.problems import integer_model, plans, with_transfers


def in_conflict() -> PlacementProblem:
    """Two values between the same nodes; each is free in one pair of states, and no pair of states is free in both."""
    names, apart = np.arange(2), np.array([[0.0, 5.0], [5.0, 0.0]])
    one, other = Transfer(0, names, ((1, names),), apart), Transfer(0, names, ((1, names[::-1]),), apart)
    return PlacementProblem((np.zeros(2), np.zeros(2)), transfers=(one, other))


def test_links_in_conflict_have_a_bound_only_when_they_are_merged() -> None:
    separate = Sweeper(from_problem(in_conflict()))
    merged = MergedSweeper(separate)
    assert worth_merging(separate) and len(merged.links) == 1
    assert max(separate.sweep(direction) for direction in (0, 1, 0, 1)) == 0
    assert max(merged.sweep(direction) for direction in (0, 1)) == 5


@settings(max_examples=80, deadline=None)
@given(with_transfers(), st.integers(0, 3))
def test_merged_tables_are_sums_and_bounds_hold(problem: PlacementProblem, pairs: int) -> None:
    try:
        model = Relaxation(integer_model(problem), None, Budget()).ascent.model
    except Exhausted:
        return
    separate = Sweeper(model)
    for direction in (0, 1) * pairs:
        separate.sweep(direction)
    merged = MergedSweeper(separate)
    costs = []
    for plan in plans(model):
        both = (
            sum(float(s.splits.table(k)[link.rows[plan[link.i]], link.columns[plan[link.j]]]) for k, link in enumerate(s.links))
            for s in (separate, merged)
        )
        first, second = both
        assert first == second
        costs.append(model.linear(plan))
    bounds = [merged.sweep(direction) for direction in (0, 1, 0, 1)]
    assert max(bounds) <= min(costs, default=np.inf)


@settings(max_examples=60, deadline=None)
@given(with_transfers(most=4))
def test_what_is_written_from_merged_links_costs_the_same(problem: PlacementProblem) -> None:
    """Of all plans below the target, none is lost, and the cheapest costs what it did."""
    model = integer_model(problem)
    every = sorted((model.evaluate(plan), tuple(plan)) for plan in plans(model))
    if not every or not np.isfinite(every[0][0]):
        return
    try:
        relaxation = Relaxation(model, None, Budget())
        relaxation.ascent.pair()
        tight: Ascent = relaxation.merge()
        tight.pair()
        left, undo = relaxation.written(find_slacks(tight, every[0][0] + 1), every[0][0] + 1)
    except Exhausted:
        raise AssertionError("the cheapest plan was pruned") from None
    found = min((left.evaluate(plan), tuple(relaxation.undo(undo(plan)))) for plan in plans(left))
    assert found[0] == every[0][0] and model.evaluate(np.asarray(found[1])) == every[0][0]


def parallel_and_shared(seed: int) -> PlacementProblem:
    """Values with two readers each, beside an edge to each reader, so that links are parallel and their prices are split."""
    rng, names = np.random.default_rng(seed), np.arange(3)
    pairs = ((0, 1), (0, 2), (1, 2), (1, 3))
    tables = tuple(rng.integers(0, 20, (3, 3)).astype(float) for _ in pairs)
    prices = [rng.integers(1, 30, (3, 3)) * (1.0 - np.eye(3)) for _ in range(2)]
    shared = tuple(Transfer(k, rng.permutation(3), ((k + 1, names), (k + 2, rng.permutation(3))), prices[k]) for k in range(2))
    return PlacementProblem(tuple(rng.integers(0, 20, 3).astype(float) for _ in range(4)), pairs, tables, transfers=shared)


@pytest.mark.parametrize("seed", range(20))
def test_the_problem_of_combined_plans_costs_the_same(seed: int) -> None:
    """Plans that have all states between them: the problem that is searched has the optimum of the whole."""
    model = integer_model(parallel_and_shared(seed))
    found: list[float] = []

    def search(fewer: Model, known: float, budget: Budget) -> tuple[None, float]:
        found.append(min(fewer.evaluate(plan) for plan in plans(fewer)))
        return None, known

    relaxation = Relaxation(model, None, Budget())
    assert worth_merging(relaxation.ascent.sweeper)
    assert _combined(relaxation, [np.full(4, state) for state in range(3)], search, Budget())
    assert found == [min(model.evaluate(plan) for plan in plans(model))]
