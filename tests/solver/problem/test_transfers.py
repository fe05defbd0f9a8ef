"""Transfers: their cost, and their forms as nodes and edges."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, Transfer, solve
from fxshard.solver.bounds import write_out
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.primal.local_search import Polish
from fxshard.solver.problem.arrays import starts
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import from_problem
from fxshard.solver.problem.scaling import quantise
from fxshard.solver.problem.transfers import Transfers
from tests.solver.expanded import expand
from tests.solver.problems import brute_force, integer_model, plans, with_transfers

PRICES = np.array([[0.0, 5.0, 7.0], [1.0, 0.0, 2.0], [9.0, 9.0, 0.0]])


def gathered() -> PlacementProblem:
    """One node produces layout 0 or 1. Three others want layouts 2, 2, and 1 or 2."""
    wants = ((1, np.array([2])), (2, np.array([2])), (3, np.array([1, 2])))
    transfer = Transfer(0, np.array([0, 1]), wants, PRICES)
    return PlacementProblem((np.zeros(2), np.zeros(1), np.zeros(1), np.array([0.0, 3.0])), transfers=(transfer,))


def test_a_layout_is_paid_once() -> None:
    problem = gathered()
    assert problem.evaluate((0, 0, 0, 0)) == 7 + 5
    assert problem.evaluate((0, 0, 0, 1)) == 7 + 3
    assert problem.evaluate((1, 0, 0, 0)) == 2
    solution = solve(problem)
    assert solution.choices == (1, 0, 0, 0) and solution.objective == solution.lower_bound == 2


@settings(max_examples=80)
@given(with_transfers(), st.integers(0, 2**32))
def test_local_costs_are_differences(problem: PlacementProblem, seed: int) -> None:
    """For each state of each node, over all transfers together; and the total cost is the sum over transfers."""
    rng, sizes = np.random.default_rng(seed), [len(cost) for cost in problem.node_costs]
    choices, transfers, offset = np.array([rng.integers(k) for k in sizes]), Transfers(problem.transfers), starts(sizes)
    base, local = np.zeros(offset[-1]), np.zeros(offset[-1])
    transfers.add(np.arange(len(sizes)), choices, offset, base, local)
    assert transfers.cost(choices) == pytest.approx(sum(t.cost(choices) for t in problem.transfers))
    for node, size in enumerate(sizes):
        own = [t for t in problem.transfers if node in t.nodes()]
        changed = [np.where(np.arange(len(sizes)) == node, state, choices) for state in range(size)]
        assert local[offset[node] : offset[node + 1]].tolist() == pytest.approx([sum(t.cost(c) for t in own) for c in changed])
        assert {n for t in own for n in t.nodes()} == set(transfers.near(node).tolist())


@settings(max_examples=80)
@given(with_transfers(memory=True))
def test_polish_keeps_local_costs_up_to_date(problem: PlacementProblem) -> None:
    model = integer_model(problem)
    for plan in plans(model)[:3]:
        polish = Polish(model, plan, Budget())
        polish.improve()
        assert model.evaluate(polish.choices) <= model.evaluate(plan)
        for node in range(len(model)):
            here = polish.local[polish.offset[node] : polish.offset[node + 1]]
            for state in range(len(model.costs[node])):
                other = np.where(np.arange(len(model)) == node, state, polish.choices)
                cost = model.evaluate(other) - model.evaluate(polish.choices)
                assert here[state] - here[polish.choices[node]] == cost


@settings(max_examples=120)
@given(with_transfers(memory=True), st.sampled_from([1, 400]))
def test_transfers_written_as_nodes_keep_all_cheaper_plans(problem: PlacementProblem, joint: int) -> None:
    """Written as one node for all joint choices of readers (MAX_JOINT 400), and as a node per layout (1)."""
    model = integer_model(problem)
    costs = sorted(model.evaluate(plan) for plan in plans(model))
    if not costs:
        return
    target = costs[len(costs) // 2] + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_out, "MAX_JOINT", joint)
        relaxation = Relaxation(model, None, Budget())
        relaxation.run()
        assert relaxation.bound <= costs[0]
        left, undo = relaxation.below(target)
    written: dict[tuple[int, ...], float] = {}
    for plan in plans(replace(left, cutoff=np.inf)):
        key = tuple(undo(plan).tolist())
        written[key] = min(left.evaluate(plan), written.get(key, np.inf))
    for plan in plans(model):
        if model.evaluate(plan) < target:
            assert written[tuple(plan.tolist())] == model.evaluate(plan)
    assert all(model.evaluate(np.asarray(key)) <= cost for key, cost in written.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prices": -PRICES}, "costs >= 0"),
        ({"prices": PRICES * np.nan}, "nan"),
        ({"source": 1}, "node 1"),
        ({"source": 9}, "node 9"),
        ({"have": np.array([0, 3])}, "layout at node 0"),
        ({"readers": ()}, "needs readers"),
        ({"readers": ((0, np.array([0, 1])),)}, "other than its source"),
    ],
)
def test_transfers_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    problem = gathered()
    with pytest.raises(ValueError, match=message):
        replace(problem, transfers=(replace(problem.transfers[0], **change),))


@settings(max_examples=60)
@given(with_transfers(memory=True, most=4))
def test_expanding_into_edges_keeps_the_cost_of_every_plan(problem: PlacementProblem) -> None:
    """With the best states of the extra nodes. The solver finds the optimum of the expanded problem, too."""
    expanded = expand(problem)
    own, extra = len(problem), [range(len(cost)) for cost in expanded.node_costs[len(problem) :]]
    if len(extra) > 8:
        return
    for choices in itertools.product(*(range(len(cost)) for cost in problem.node_costs)):
        best = min(expanded.evaluate((*choices, *more)) for more in itertools.product(*extra))
        assert best == problem.evaluate(choices)
    least = brute_force(problem)
    if np.isfinite(least):
        solution = solve(expanded)
        assert solution.objective == solution.lower_bound == problem.evaluate(solution.choices[:own]) == least


def test_the_contest_format_holds_expanded_transfers_only(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    with pytest.raises(ValueError, match="1 transfers"):
        gathered().write(path)
    expand(gathered()).write(path)
    assert solve(PlacementProblem.read(path)).objective == solve(gathered()).objective


@pytest.mark.parametrize("price", [3.5e7, 2.5e14])
def test_prices_that_are_always_paid_are_scaled_to_exact_integers(price: float) -> None:
    """A value of one layout is moved to another whatever is chosen; other costs are small. Sums of integers above 2^53 would be rounded."""
    name = np.zeros(2, dtype=np.int64)
    moved = Transfer(0, name, ((1, name), (2, name)), np.array([[price]]))
    costs = (np.array([0.25, 0.5]), np.array([0.125, 1.0]), np.array([0.75, 0.3]))
    model, scale = quantise(from_problem(PlacementProblem(costs, transfers=(moved,))))
    assert model.transfers[0].prices.max() <= 2**46
    assert model.evaluate(np.array([0, 0, 1])) / scale.factor == pytest.approx(price + 0.675, rel=1e-12)
