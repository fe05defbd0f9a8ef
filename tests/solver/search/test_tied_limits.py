"""Models of repeated layers under limits: rows of tied models, and plans that mix kinds of layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, solve
from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.bounds.tied_messages import initialise_from_tied
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.rows import Live, Row
from fxshard.solver.problem.transfers import Transfer
from fxshard.solver.reductions import reduce
from fxshard.solver.reductions.arc_consistency import ArcConsistency
from fxshard.solver.search.case_split import search_tables
from fxshard.solver.search.combining import combine
from fxshard.solver.search.tied_limits import start_from_tied
from fxshard.solver.search.tied_model import classes_of, tie
from tests.solver.problems import brute_force, integer_model, plans
from tests.solver.search.test_tied_model import check_splits, stack


def with_limits(problem: PlacementProblem, width: int, limit: float, seed: int) -> PlacementProblem:
    """Each layer's first node and its value use memory for a while, the same in all layers; a soft row counts the nodes."""
    rng = np.random.default_rng(seed)
    own, moved = rng.integers(0, 9, 2).astype(float), rng.integers(0, 5, (2, 2)).astype(float)
    layers = (len(problem) - 1) // width
    lives = [Live(layer, layers + 1, own, layer * width) for layer in range(layers)]
    lives += [Live(layer, layer + 2, moved, transfer=layer) for layer in range(layers - 1)]
    row = Row(limit / 3, tuple((layer * width, own) for layer in range(layers)), slope=2.0)
    return replace(problem, lives=tuple(lives), usage_limit=limit, rows=(row,))


@given(st.integers(3, 6), st.integers(1, 2), st.integers(0, 2**32), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_tied_plan_costs_and_uses_what_it_does_in_the_whole(layers: int, width: int, seed: int, links: int) -> None:
    model = integer_model(with_limits(stack(layers, width, seed), width, 20.0, seed))
    made = tie(model, classes_of(model, links))
    for plan in plans(made.model):
        whole = made.expand(plan)
        np.testing.assert_allclose(made.model.usage(plan), model.usage(whole))
        assert made.model.evaluate(plan) == model.evaluate(whole)


@given(st.integers(3, 5), st.integers(1, 2), st.integers(0, 2**32), st.integers(5, 60))
@settings(max_examples=80, deadline=None)
def test_a_search_within_limits_that_starts_tied_finds_the_optimum(layers: int, width: int, seed: int, limit: int) -> None:
    problem = with_limits(stack(layers, width, seed), width, float(limit), seed)
    optimum = brute_force(problem)
    assume(np.isfinite(optimum))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxshard.solver.search.tied_limits.MOST_CLASSES", 1)
        solution = solve(problem)
    assert solution.objective == pytest.approx(optimum, rel=1e-9) and solution.proven


@given(st.integers(3, 5), st.integers(1, 2), st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 40))
@example(5, 2, 0, 0, 20)  # equal layers, of which some are at the row's time and others are not
@settings(max_examples=100, deadline=None)
def test_bounds_hold_from_the_messages_of_a_tied_model_at_any_multipliers(
    layers: int, width: int, seed: int, links: int, multiplier: int
) -> None:
    """The Lagrangian's least cost is at least the bound."""
    model = integer_model(with_limits(stack(layers, width, seed), width, 20.0, seed))
    made = tie(model, classes_of(model, links))
    multipliers = np.zeros(len(model.limits))
    multipliers[seed % len(multipliers)] = multiplier / 8
    small, large = (Ascent(one, Budget(), lambda choices, cost: np.inf) for one in (made.model, model))
    for ascent in (small, large):
        ascent.set_prices(multipliers)
    assume(np.isfinite([small.pair() for _ in range(3)]).all())
    initialise_from_tied(small.sweeper, large.sweeper, made.of, made.links)
    check_splits(large.sweeper, large.memory.priced(model, large.multipliers).transfers)
    costs = [model.linear(plan) + float(large.multipliers @ large.excess(plan)) for plan in plans(model)]
    least = min(costs, default=np.inf)
    for _ in range(3):
        assert large.pair() <= least + 1e-9


def layers_of_two_kinds(layers: int, limit: float) -> PlacementProblem:
    """A chain of equal layers, each of which takes 3 or holds 10 bytes to the end; a change of kind between neighbours costs 1."""
    names, change = np.arange(2), np.array([[0.0, 1.0], [1.0, 0.0]])
    return PlacementProblem(
        tuple(np.array([0.0, 3.0]) for _ in range(layers)),
        transfers=tuple(Transfer(k, names, ((k + 1, names),), change) for k in range(layers - 1)),
        lives=tuple(Live(k, layers, np.array([10.0, 0.0]), k) for k in range(layers)),
        usage_limit=limit,
    )


@pytest.mark.parametrize("held", [1, 13, 20, 39])
def test_layers_of_both_kinds_are_combined(held: int) -> None:
    """The tied plans are all of one kind; the best plan within the limit has ``held`` layers of the other, side by side. The plan that
    local search made on the way is taken away, so that only the planes tell of both kinds."""
    problem = layers_of_two_kinds(40, 10.0 * held + 5)
    relaxation = Relaxation(integer_model(problem), None, Budget())
    assert start_from_tied(relaxation, Budget())
    kinds = [set(plane.choices.tolist()) for plane in relaxation.ascent.bundle.planes]
    assert {0} in kinds and {1} in kinds
    relaxation.choices, relaxation.value, relaxation.ascent.cutoff = None, np.inf, np.inf
    combine(relaxation, search_tables, Budget())
    assert relaxation.value == 3 * (40 - held) + 1


def test_the_history_says_that_the_search_started_tied() -> None:
    names = [name for name, _ in solve(layers_of_two_kinds(40, 135.0)).steps]
    assert names.index("tied model") < names.index("message passing")


def test_a_model_without_equal_nodes_does_not_start_tied() -> None:
    problem = layers_of_two_kinds(8, 35.0)
    costs = tuple(np.array([0.0, 3.0 + k]) for k in range(8))
    assert not start_from_tied(Relaxation(integer_model(replace(problem, node_costs=costs)), None, Budget()), Budget())


@given(st.integers(2, 7), st.integers(2, 4), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_consistent_decoding_finds_a_plan_of_any_tree(nodes: int, states: int, seed: int) -> None:
    """On a tree, arc consistency leaves every partial choice a completion, in whatever order nodes come."""
    rng = np.random.default_rng(seed)
    order, parent = rng.permutation(nodes), [int(rng.integers(0, k)) for k in range(1, nodes)]
    edges = [(int(order[k]), int(order[p])) for k, p in enumerate(parent, 1)]
    tables = [np.where(rng.random((states, states)) < 0.5, np.inf, rng.integers(0, 9, (states, states))) for _ in edges]
    problem = PlacementProblem(tuple(rng.integers(0, 9, states).astype(float) for _ in range(nodes)), tuple(edges), tuple(tables))
    assume(np.isfinite(brute_force(problem)))
    model, _, _ = reduce(integer_model(problem), (ArcConsistency(),), 1)
    sweeper = Sweeper(model)
    for direction in (0, 1):
        plan = sweeper.decode(direction, consistent=True)
        assert plan is not None and np.isfinite(model.evaluate(plan))


def test_a_choice_reaches_the_ends_of_a_star_whose_centre_comes_last() -> None:
    """Four nodes that must agree, by edges to a fifth: decoded one by one, the costs of each decide, and nothing is left for the fifth."""
    same = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    costs = (np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.zeros(2))
    sweeper = Sweeper(integer_model(PlacementProblem(costs, tuple((k, 4) for k in range(4)), (same,) * 4)))
    assert sweeper.decode(0) is None
    plan = sweeper.decode(0, consistent=True)
    assert plan is not None and len(set(plan.tolist())) == 1
