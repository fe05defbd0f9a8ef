"""Sessions: a problem solved again with some states forbidden, against enumeration."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fxshard.solver import InfeasibleError, PlacementProblem, Session, Transfer
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.problem.arrays import BoolArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, from_problem
from fxshard.solver.problem.scaling import quantise
from fxshard.solver.search.subproblem import Reparametrised
from tests.solver.problems import brute_force, grid, with_rows, with_transfers

session_module = sys.modules[Session.__module__]
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def narrowed(problem: PlacementProblem, allowed: dict[int, BoolArray]) -> PlacementProblem:
    costs = [np.where(allowed[i], c, np.inf) if i in allowed else c for i, c in enumerate(problem.node_costs)]
    return replace(problem, node_costs=tuple(costs))


def some_allowed(problem: PlacementProblem, seed: int) -> dict[int, BoolArray]:
    rng = np.random.default_rng(seed)
    nodes = rng.choice(len(problem), size=min(len(problem), int(rng.integers(1, 3))), replace=False)
    return {int(i): rng.random(len(problem.node_costs[i])) < 0.5 for i in nodes}


@given(
    with_transfers() | with_transfers(memory=True) | with_rows(hard=True, memory=True),
    st.lists(st.integers(0, 2**32), min_size=3, max_size=3),
)
@settings(max_examples=40, suppress_health_check=SLOW)
def test_again_gives_optimum_and_bounds(problem: PlacementProblem, seeds: list[int]) -> None:
    try:
        session = Session(problem, region=2)
    except InfeasibleError:
        assume(False)
    for seed in seeds:
        allowed = some_allowed(problem, seed)
        true = brute_force(narrowed(problem, allowed))
        if np.isinf(true):
            with pytest.raises(InfeasibleError):
                session.again(allowed)
            continue
        found = session.again(allowed)
        assert found.objective == pytest.approx(true, rel=1e-9)
        assert problem.evaluate(found.choices) == pytest.approx(found.objective, rel=1e-12)
        assert problem.feasible(found.choices) and all(mask[found.choices[node]] for node, mask in allowed.items())
        rough = session.again(allowed, gap=0.5)
        assert rough.lower_bound <= true * (1 + 1e-9) and rough.objective >= true * (1 - 1e-9)
        assert rough.gap <= 0.5
        brief = session.again(allowed, deep=False)
        assert brief.lower_bound <= true * (1 + 1e-9) and brief.objective >= true * (1 - 1e-9)
        assert problem.feasible(brief.choices) and all(mask[brief.choices[node]] for node, mask in allowed.items())


def test_without_a_region_again_continues_from_the_first_messages() -> None:
    """Each call restores the sweeper to its state after the first solve."""
    continued = 0
    for seed in range(8):
        problem = grid(3, 3, 3, seed, transfers=True, integers=seed % 2 == 0)
        session = Session(problem, region=2)
        for node in range(len(problem)):
            allowed = {node: np.arange(3) != session.solution.choices[node]}
            true = brute_force(narrowed(problem, allowed))
            found = session.again(allowed, gap=1e-3)
            assert found.lower_bound <= true * (1 + 1e-9) and true * (1 - 1e-9) <= found.objective <= true * (1 + 1e-3)
            assert allowed[node][found.choices[node]] and found.gap <= 1e-3
            continued += found.steps[0][0] == "messages of the first solve"
    assert continued > 20


def test_with_limits_the_bound_is_valid_even_if_the_plan_is_poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continues from the multipliers of the first solve, with so little work that it seldom finds the best plan."""
    monkeypatch.setattr(session_module, "WITHIN_WORK", 1)
    monkeypatch.setattr(session_module, "AGAIN_WORK", 1)
    worse, tight = 0, 0
    for seed in range(6):
        problem = grid(3, 3, 3, seed, memory=True, transfers=True)
        session = Session(problem)
        for node in range(len(problem)):
            allowed = {node: np.arange(3) != session.solution.choices[node]}
            true = brute_force(narrowed(problem, allowed))
            found = session.again(allowed, deep=False)
            if found.steps[:1] == (("multipliers of the first solve", "continued"),):
                assert found.lower_bound <= true * (1 + 1e-9) and found.objective >= true * (1 - 1e-9)
                assert problem.feasible(found.choices)
                worse += found.objective > true * (1 + 1e-9)
                tight += found.lower_bound > 0.95 * true
    assert worse > 10 and tight > 30


def optimum(model: Model) -> float:
    return brute_force(
        PlacementProblem(
            tuple(model.costs), tuple(model.edges), tuple(model.edges.values()), (), (), None, (), tuple(model.transfers)
        )
    ) + model.constant  # fmt: skip


def some_region(problem: PlacementProblem, data: st.DataObject) -> tuple[Reparametrised, np.ndarray]:
    model, _ = quantise(from_problem(problem))
    try:
        relaxation = Relaxation(model, None, Budget())
    except Exhausted:
        assume(False)
    ascent = relaxation.ascent
    for _ in range(data.draw(st.integers(0, 3))):
        if np.isinf(ascent.pair()):
            assume(False)
    proven = Reparametrised(ascent)
    some = data.draw(st.sets(st.integers(0, len(problem) - 1), min_size=1))
    return proven, np.asarray(sorted(some), dtype=np.int64)


@given(with_transfers(), st.data())
@settings(max_examples=60, suppress_health_check=SLOW)
def test_the_optimum_of_a_region_bounds_the_whole(problem: PlacementProblem, data: st.DataObject) -> None:
    """For any messages. The region of all nodes is the model itself."""
    proven, nodes = some_region(problem, data)
    assert proven.bound <= optimum(proven.region(nodes)) <= optimum(proven.model)
    assert optimum(proven.region(np.arange(len(problem)))) == optimum(proven.model)


@given(with_transfers(), st.data())
@settings(max_examples=50, suppress_health_check=SLOW)
def test_changes_in_a_surrounded_region_cost_the_same_as_in_the_whole(problem: PlacementProblem, data: st.DataObject) -> None:
    proven, nodes = some_region(problem, data)
    whole, rng = proven.model, np.random.default_rng(data.draw(st.integers(0, 2**32)))
    plan, other = (np.asarray([rng.integers(len(c)) for c in whole.costs]) for _ in range(2))
    part, members = proven.surrounded(nodes, plan)
    inside = np.isin(members, nodes)
    changed = plan.copy()
    changed[nodes] = other[nodes]
    before, after = (part.evaluate(np.where(inside, choice[members], 0)) for choice in (plan, changed))
    if np.isfinite([whole.evaluate(plan), whole.evaluate(changed)]).all():
        assert after - before == whole.evaluate(changed) - whole.evaluate(plan)


def test_a_long_chain_is_answered_from_a_region() -> None:
    """The chain is much longer than the region; the answer is exact."""
    problem, costs, prices = _long_chain(400)
    session = Session(problem, region=30)
    for node in (0, 57, 399):
        for state in range(4):
            found = session.again({node: np.arange(4) == state})
            assert found.steps[0][0] == "region"
            assert found.objective == found.lower_bound == _chain(costs, prices, node, state)


def test_continuing_respects_forbidden_states() -> None:
    """On a chain messages are exact: continued from the first solve, the bound equals the cost of a pin."""
    problem, costs, prices = _long_chain(40)
    model, scale = quantise(from_problem(problem))
    relaxation = Relaxation(model, None, Budget())
    relaxation.run()
    state, first = relaxation.ascent.sweeper.state(), relaxation.value
    assert relaxation.choices is not None and relaxation.bound == first
    for node in (0, 17, 39):
        for kept in range(4):
            allowed = np.arange(4) == kept
            pinned = relaxation.choices.copy()
            pinned[node] = kept
            narrow = [np.where(allowed, c, np.inf) if i == node else c for i, c in enumerate(model.costs)]
            inner = replace(model, costs=narrow)
            again = relaxation.from_state(state, inner, inner, pinned, 0.0, Budget())
            again.run()
            assert again.bound == again.value == _chain(costs, prices, node, kept) * scale.factor
            assert again.choices is not None and again.choices[node] == kept


def _long_chain(count: int) -> tuple[PlacementProblem, tuple[np.ndarray, ...], list[np.ndarray]]:
    """A chain of nodes with four states, each of which reads the value of the one before; also the node costs and transfer prices."""
    rng, layouts = np.random.default_rng(0), np.arange(4)
    costs = tuple(rng.integers(0, 100, 4).astype(float) for _ in range(count))
    prices = [rng.integers(1, 100, (4, 4)) * (1.0 - np.eye(4)) for _ in range(count)]
    transfers = tuple(Transfer(i, layouts, ((i + 1, layouts),), prices[i]) for i in range(count - 1))
    return PlacementProblem(costs, transfers=transfers), costs, prices


def _chain(costs: tuple[np.ndarray, ...], prices: list[np.ndarray], node: int, state: int) -> float:
    """The least cost of the chain with ``node`` in ``state``, by dynamic programming."""
    best = np.zeros(len(costs[0]))
    for i, own in enumerate(costs):
        best = own + (best if i == 0 else (best[:, None] + prices[i - 1]).min(axis=0))
        if i == node:
            best = np.where(np.arange(len(own)) == state, best, np.inf)
    return float(best.min())


def test_readers_outside_a_region_keep_their_share_of_a_price() -> None:
    """Two readers share one price of 10. A region with one of them must not count the share of the other again."""
    one = np.asarray([1])
    problem = PlacementProblem(
        (np.zeros(1),) * 3, transfers=(Transfer(0, one - 1, ((1, one), (2, one)), np.asarray([[0.0, 10.0], [10.0, 0.0]])),)
    )
    proven = Reparametrised(Relaxation(quantise(from_problem(problem))[0], None, Budget()).ascent)
    assert [optimum(proven.region(np.asarray(nodes))) for nodes in ([0], [0, 1], [0, 1, 2])] == [optimum(proven.model)] * 3
