"""The loops of local search make the same choice as trying every single change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem
from fxshard.solver.primal import local_search
from fxshard.solver.primal.local_search import Polish, greedy
from fxshard.solver.primal.local_search_kernels import best_move
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model
from tests.solver.problems import integer_model, problems, with_rows


def changes(model: Model, choices: IntArray) -> list[tuple[int, IntArray]]:
    """All single changes, each with the position of its state among all states."""
    found = []
    position = 0
    for node, cost in enumerate(model.costs):
        for state in range(len(cost)):
            changed = choices.copy()
            changed[node] = state
            found.append((position + state, changed))
        position += len(cost)
    return found


def allowed_plan(model: Model, seed: int) -> IntArray | None:
    """A random plan without forbidden states or pairs; it may exceed memory."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        choices = np.asarray([rng.integers(len(cost)) for cost in model.costs], dtype=np.int64)
        if np.isfinite(model.evaluate(choices)):
            return choices
    return None


@settings(max_examples=100)
@given(problems(most=6))
def test_a_greedy_plan_is_allowed_or_there_is_none(problem: PlacementProblem) -> None:
    model = integer_model(problem)
    choices = greedy(model)
    assert choices is None or np.isfinite(model.evaluate(choices))


@settings(max_examples=200)
@given(st.one_of(problems(memory=True, most=5), with_rows(memory=True)), st.integers(0, 2**32))
def test_a_move_is_the_best_change(problem: PlacementProblem, seed: int) -> None:
    """Rows that may be exceeded at a price neither block a move nor require one; transfers count in rows as nodes do."""
    model = integer_model(problem)
    choices = allowed_plan(model, seed)
    if choices is None:
        return
    polish, hard = Polish(model, choices, Budget()), np.isinf(model.slopes)
    cost, room = model.linear(choices), np.where(hard, model.limits - model.usage(choices), np.inf)
    every = changes(model, choices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_search, "MAX_MOVES", 1)
        if model.fits(choices):
            polish.improve()
            better = [(model.linear(c) - cost, p) for p, c in every if model.linear(c) < cost and model.fits(c)]
        else:
            polish.repair()
            row = int(room.argmin())
            saved = [(model.usage(choices)[row] - model.usage(c)[row], model.linear(c) - cost, p) for p, c in every]
            better = [(extra / min(bytes_, -room[row]), p) for bytes_, extra, p in saved if bytes_ > 0 and np.isfinite(extra)]
    expected = dict(every)[min(better)[1]] if better else choices
    assert polish.choices.tolist() == expected.tolist()
    assert np.allclose(polish.room, np.where(hard, model.limits - model.usage(expected), np.inf))


@settings(max_examples=100)
@given(st.one_of(problems(memory=True, most=5), with_rows(hard=True, memory=True)), st.integers(0, 2**32))
def test_a_move_that_rows_blocked_before(problem: PlacementProblem, seed: int) -> None:
    model = integer_model(problem)
    choices = allowed_plan(model, seed)
    if choices is None or not model.fits(choices):
        return
    polish, uses, moved = Polish(model, choices, Budget()), model.use_table.flat, model.moving.flat
    cost, every = model.evaluate(choices), changes(model, choices)
    better = [(model.evaluate(c) - cost, p) for p, c in every if model.evaluate(c) < cost and model.fits(c)]
    witness, seen = np.full(len(every), -1), np.zeros(len(every))
    best_move(polish.local, polish.offset, choices, uses, moved, polish.room - 3, witness, seen)  # with less room, so that rows block
    for _ in range(2):
        found = best_move(polish.local, polish.offset, choices, uses, moved, polish.room, witness, seen)
        assert found == min(better, default=(0, -1))[1]


@settings(max_examples=100)
@given(with_rows(memory=True), st.integers(0, 2**32))
def test_a_polished_plan_fits_and_no_change_makes_it_cheaper(problem: PlacementProblem, seed: int) -> None:
    model = integer_model(problem)
    choices = allowed_plan(model, seed)
    plan = None if choices is None else Polish(model, choices, Budget()).run()
    if plan is not None:
        assert model.fits(plan)
        assert all(model.linear(changed) >= model.linear(plan) for _, changed in changes(model, plan) if model.fits(changed))


@settings(max_examples=100)
@given(problems(memory=True, most=5), st.integers(0, 2**32))
def test_the_greatest_usage_is_the_peak(problem: PlacementProblem, seed: int) -> None:
    model = integer_model(problem)
    choices = np.asarray([np.random.default_rng(seed).integers(len(cost)) for cost in model.costs], dtype=np.int64)
    rows = model.usage(choices)
    assert len(rows) == len(model.limits)
    assert max(rows, default=0.0) == problem.peak(choices)
