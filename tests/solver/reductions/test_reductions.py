"""Every reduction keeps the optimum, and its inverse gives a plan of the same cost that fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model
from fxshard.solver.reductions import REDUCTIONS, Step, reduce
from tests.solver.clocks import Looks
from tests.solver.problems import integer_model, optimum, plans, problems


def check(step: Step, model: Model, budget: Budget = UNLIMITED) -> None:
    best = optimum(model)
    try:
        smaller, undo = step.apply(model, budget)
    except Exhausted:
        assert np.isinf(best)
        return
    assert optimum(smaller) == best
    for plan in plans(smaller):
        old = undo(plan)
        assert model.evaluate(old) == smaller.evaluate(plan)
        assert model.fits(old)


@pytest.mark.parametrize("step", REDUCTIONS, ids=lambda step: step.name)
@settings(max_examples=60)
@given(problem=problems(memory=True, most=4))
def test_alone(step: Step, problem: PlacementProblem) -> None:
    check(step, integer_model(problem))


@pytest.mark.parametrize("step", REDUCTIONS, ids=lambda step: step.name)
@settings(max_examples=40)
@given(problem=problems(memory=True, most=5))
def test_after_all_others(step: Step, problem: PlacementProblem) -> None:
    try:
        model = reduce(integer_model(problem), rounds=1)[0]
    except Exhausted:
        return
    check(step, model)


@pytest.mark.parametrize("step", REDUCTIONS, ids=lambda step: step.name)
@settings(max_examples=30)
@given(problem=problems(memory=True, most=4), looks=st.integers(0, 8))
def test_cut_by_the_clock(step: Step, problem: PlacementProblem, looks: int) -> None:
    check(step, integer_model(problem), Looks(looks))


@settings(max_examples=60)
@given(problem=problems(memory=True, most=5))
def test_with_a_cutoff_cheaper_plans_stay(problem: PlacementProblem) -> None:
    model = integer_model(problem)
    costs = sorted({model.evaluate(plan) for plan in plans(model)})
    for cutoff in costs[:3]:
        try:
            smaller, undo, _ = reduce(replace(model, cutoff=cutoff + 1))
        except Exhausted:
            pytest.fail("the plan below the cutoff was lost")
        best = min(plans(smaller), key=smaller.evaluate)
        assert model.evaluate(undo(best)) == costs[0]


def test_no_forbidden_state_is_left() -> None:
    """The last steps of a round may make such states. Message passing would get NaN from them, and so a wrong bound."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        pairs = [(i, j) for i in range(14) for j in range(i) if rng.random() < 0.25]
        tables = [np.where(rng.random((4, 4)) < 0.4, np.inf, rng.integers(0, 50, (4, 4))) for _ in pairs]
        try:
            whole = integer_model(PlacementProblem((np.zeros(4),) * 14, tuple(pairs), tuple(tables)))
            model = reduce(whole, rounds=1, budget=Looks(5 * seed) if seed % 2 else UNLIMITED)[0]
        except Exhausted:
            continue
        assert all(np.isfinite(cost).all() for cost in model.costs)


def test_nothing_to_do_gives_the_model_itself() -> None:
    model = integer_model(PlacementProblem(()))
    for step in REDUCTIONS[1:]:
        assert step.apply(model)[0] is model
