"""Lower bounds are valid after any sweep, at any price of memory, and after pruning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem
from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.multipliers import RowPrices
from fxshard.solver.bounds.pruning import prune
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model
from fxshard.solver.reductions import reduce
from tests.solver.problems import grid, integer_model, optimum, plans, problems, swept


def reduced(problem: PlacementProblem) -> Model | None:
    try:
        model = reduce(integer_model(problem), rounds=1)[0]
    except Exhausted:
        return None
    return model if len(model) else None


@settings(max_examples=80)
@given(problems(most=6))
def test_the_bound_is_valid_after_every_sweep(problem: PlacementProblem) -> None:
    model = reduced(problem)
    if model is None:
        return
    for _ in swept(model, 6):
        pass


@settings(max_examples=60)
@given(problems(most=5), st.integers(0, 2**32))
def test_the_bound_is_valid_for_any_messages(problem: PlacementProblem, seed: int) -> None:
    model = reduced(problem)
    if model is None:
        return
    sweeper, rng = Sweeper(model), np.random.default_rng(seed)
    for direction in (0, 1):
        noise = rng.integers(-50, 50, len(sweeper.messages[direction])).astype(float)
        start = sweeper.wiring.message[direction]
        for k, link in enumerate(sweeper.links):
            node = link.ends[1 - direction]
            sweeper.weights[sweeper.offset[node] : sweeper.offset[node + 1]] += noise[start[k] + link.classes(1 - direction)]
        sweeper.messages[direction] += noise
    assert sweeper.sweep(0) <= optimum(model)


@settings(max_examples=80)
@given(problems(memory=True, most=5), st.floats(0, 100))
def test_prices_of_memory_never_exceed_the_allowance(problem: PlacementProblem, price: float) -> None:
    model = integer_model(problem)
    memory = RowPrices(model)
    multipliers = memory.round(np.full(len(model.limits), price))
    paid, start = memory.prices(multipliers), np.concatenate([[0], np.cumsum([len(c) for c in model.costs])])
    for plan in plans(model):
        assert paid[start[:-1] + plan].sum() <= memory.allowance(multipliers)


@settings(max_examples=80)
@given(problems(memory=True, most=5))
def test_pruning_keeps_all_cheaper_plans(problem: PlacementProblem) -> None:
    model = reduced(problem)
    if model is None:
        return
    costs = sorted({model.evaluate(plan) for plan in plans(model)})
    if not costs:
        return
    model = replace(model, cutoff=costs[len(costs) // 2] + 1)
    ascent = Ascent(model, Budget(), lambda choices, cost: np.inf)
    ascent.run()
    assert ascent.bound <= costs[0]
    pruned = prune(ascent)
    for plan in plans(model):
        if model.evaluate(plan) < model.cutoff:
            assert pruned.evaluate(plan) == model.evaluate(plan)


class Unpolished(Ascent):
    """An ascent without local search, so that only sweeps and decoding count as work."""

    def _try(self, plan: IntArray) -> IntArray | None:
        return plan


def test_decoding_is_work() -> None:
    """Decoding reads all states, and their classes: of 9 nodes and at both ends of 12 links."""
    budget = Budget(work_limit=1e9)
    ascent = Unpolished(integer_model(grid(3, 3, 3, 0)), budget, lambda choices, cost: np.inf)
    ascent.settle(1)
    assert budget.work_left == 1e9 - 2 * (ascent.sweeper.entries + 2 * (9 * 3 + 12 * 2 * 3))
