"""Tied models, in which equal nodes make equal choices, against enumeration and a shortest path through a stack of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, Transfer, solve
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.bounds.tied_messages import initialise_from_tied
from fxshard.solver.problem.budget import Budget
from fxshard.solver.search import core_problem as core
from fxshard.solver.search import tied_model as tied
from fxshard.solver.search.case_split import search_by_cases
from fxshard.solver.search.tied_model import classes_of, search_tied, tie
from fxshard.solver.solve import solve_within
from tests.solver.problems import brute_force, grid, integer_model, optimum, plans


def stack(layers: int, width: int, seed: int, *, shared: bool = True, wants: int = 3) -> PlacementProblem:
    """Layers of ``width`` nodes with 2 states and edges. The next two layers read a layer's value, and all layers read one last node.

    shared: layers share their arrays; otherwise they have equal copies. wants: how many different wants the readers of a value have.
    """
    rng = np.random.default_rng(seed)

    def numbers(*shape: int, forbidden: float = 0.1) -> np.ndarray:
        return np.where(rng.random(shape) < forbidden, np.inf, rng.integers(0, 50, shape))

    def again(array: np.ndarray) -> np.ndarray:
        return array if shared else array.copy()

    costs, table = [numbers(2, forbidden=0.0) for _ in range(width)], numbers(2, 2)
    prices = np.where(np.eye(2, dtype=bool), 0.0, numbers(2, 2))
    have, wanted = rng.integers(0, 2, 2), [rng.integers(0, 2, 2) for _ in range(wants)] * 3
    every, within = layers * width, range(width - 1)
    transfers = []
    for layer in range(layers - 1):
        first = layer * width
        last, readers = first + width - 1, [first + width, *([first + 2 * width] if layer + 2 < layers else []), every]
        transfers.append(
            Transfer(last, have, tuple((node, again(want)) for node, want in zip(readers, wanted, strict=False)), again(prices))
        )
    transfers.append(Transfer(every, have, tuple((layer * width, again(wanted[0])) for layer in range(layers)), prices))
    return PlacementProblem(
        (*(again(cost) for _ in range(layers) for cost in costs), np.zeros(2)),
        tuple((layer * width + k, layer * width + k + 1) for layer in range(layers) for k in within),
        tuple(again(table) for _ in range(layers) for _ in within),
        transfers=tuple(transfers),
    )


@given(st.integers(3, 6), st.integers(1, 2), st.integers(0, 2**32), st.booleans(), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_plans_of_a_tied_model_are_those_with_equal_choices_in_each_class(
    layers: int, width: int, seed: int, shared: bool, links: int
) -> None:
    model = integer_model(stack(layers, width, seed, shared=shared))
    classes = classes_of(model, links)
    made = tie(model, classes)
    found = {tuple(made.expand(plan)): made.model.evaluate(plan) for plan in plans(made.model)}
    first = [int(np.flatnonzero(classes == k)[0]) for k in range(classes.max() + 1)]
    assert found == {tuple(plan): model.evaluate(plan) for plan in plans(model) if all(plan == plan[first][classes])}


def test_inner_layers_are_one_class_with_shared_and_with_equal_arrays() -> None:
    """Layers near the ends differ: the last have fewer readers, which makes the neighbours of their neighbours different, and so on."""
    for shared in (True, False):
        model = integer_model(stack(20, 2, 1, shared=shared))
        classes = classes_of(model, 3)
        layers = classes[:-1].reshape(20, 2)
        middle = layers[5:-5]
        assert (middle == middle[0]).all() and middle[0, 0] != middle[0, 1]
        assert (layers[-1] != middle[0]).any() and (layers[0] != middle[0]).any()


def chain(layers: int, states: int, seed: int) -> PlacementProblem:
    """A value passed from layer to layer, for which any change costs, between two ends that want two different states."""
    rng = np.random.default_rng(seed)
    own, change = rng.integers(0, 5, states).astype(float), rng.integers(20, 40, (states, states)) * (1.0 - np.eye(states))
    start, end = (np.where(np.arange(states) == k, 0.0, 1000.0) for k in rng.permutation(states)[:2])
    names = np.arange(states)
    transfers = tuple(Transfer(k, names, ((k + 1, names),), change) for k in range(layers + 1))
    return PlacementProblem((start, *(own for _ in range(layers)), end), transfers=transfers)


def shortest(problem: PlacementProblem) -> float:
    """The least cost of a chain, by dynamic programming."""
    far = problem.node_costs[0]
    for transfer, cost in zip(problem.transfers, problem.node_costs[1:], strict=True):
        far = (far[:, None] + transfer.prices).min(axis=0) + cost
    return float(far.min())


@pytest.mark.parametrize("seed", range(10))
def test_a_stack_with_equal_inner_layers_is_solved_by_its_tied_model(seed: int) -> None:
    """A change costs more than the difference of states, so that all layers stay in one state; the ends are not tied."""
    problem = chain(60, 4, seed)
    relaxation = Relaxation(integer_model(problem), None, Budget())
    assert search_tied(relaxation, search_by_cases, Budget())
    assert relaxation.choices is not None and problem.evaluate(relaxation.choices) == shortest(problem)
    assert relaxation.choices[0] != relaxation.choices[-1]


def test_the_tied_model_comes_first_even_with_small_tables() -> None:
    problem = chain(60, 4, 0)
    solution = solve_within(problem, Budget())
    assert [name for name, _ in solution.steps][1] == "tied model"
    assert solution.objective == shortest(problem) and solution.proven


@pytest.mark.parametrize(("width", "seed"), [(2, 4), (3, 3)])
def test_a_stack_with_many_equal_plans_is_proven_with_much_less_work(width: int, seed: int) -> None:
    problem, done = stack(100, width, seed), []
    for most in (tied.MOST_CLASSES, 0.0):
        budget = Budget(work_limit=1e9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tied, "MOST_CLASSES", most)
            solution = solve_within(problem, budget)
        assert solution.proven and budget.work_left is not None
        done.append((1e9 - budget.work_left, solution.objective))
    assert done[0][0] < done[1][0] / 10 and done[0][1] == done[1][1]


def test_a_plan_at_the_sum_of_least_node_costs_is_not_searched_again() -> None:
    """The known plan has every node in its cheapest state and no transfer to pay, so no plan is cheaper."""
    problem = chain(60, 3, 0)
    problem = replace(problem, node_costs=(np.array([1.0, 2.0, 2.0]),) * 62)
    relaxation = Relaxation(integer_model(problem), np.zeros(62, dtype=np.int64), Budget())
    assert not search_tied(relaxation, search_by_cases, Budget())
    dearer = Relaxation(integer_model(problem), np.ones(62, dtype=np.int64), Budget())
    assert search_tied(dearer, search_by_cases, Budget()) and dearer.value == relaxation.value


def test_a_model_with_a_memory_limit_is_not_tied() -> None:
    """The memory of equal nodes adds up. One node for all of them could not choose a state for some only."""
    problem = replace(chain(20, 2, 0), usages=(np.array([1.0, 2.0]),) * 22, intervals=((0, 1),) * 22, usage_limit=30.0)
    assert not search_tied(Relaxation(integer_model(problem), None, Budget()), search_by_cases, Budget())


def test_a_model_without_equal_nodes_is_not_tied() -> None:
    relaxation = Relaxation(integer_model(grid(5, 8, 3, 0, transfers=True, integers=True)), None, Budget())
    assert not search_tied(relaxation, search_by_cases, Budget()) and relaxation.choices is None


def test_no_plan_if_equal_nodes_cannot_make_equal_choices() -> None:
    """Neighbours in a chain must differ, but nodes of one class cannot."""
    problem, names = chain(60, 3, 0), np.arange(3)
    differ = np.where(np.eye(3, dtype=bool), np.inf, 1.0)
    problem = replace(problem, transfers=tuple(Transfer(k, names, ((k + 1, names),), differ) for k in range(61)))
    relaxation = Relaxation(integer_model(problem), None, Budget())
    assert not search_tied(relaxation, search_by_cases, Budget()) and relaxation.choices is None
    assert solve(problem).proven


@given(st.integers(3, 6), st.integers(1, 2), st.integers(0, 2**32), st.sampled_from([0, 10**9]))
@settings(max_examples=80, deadline=None)
def test_a_search_that_starts_tied_finds_the_optimum(layers: int, width: int, seed: int, large: int) -> None:
    problem = stack(layers, width, seed)
    optimum = brute_force(problem)
    if np.isfinite(optimum):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "LARGE", large)
            patch.setattr(tied, "MOST_CLASSES", 1)
            solution = solve(problem)
        assert solution.objective == pytest.approx(optimum, rel=1e-9) and solution.proven


@given(st.integers(3, 6), st.integers(1, 2), st.integers(0, 2**32), st.sampled_from([1, 3]), st.integers(0, 3), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_bounds_are_valid_from_the_messages_of_a_tied_model(layers: int, width: int, seed: int, wants: int, links: int, pairs: int) -> None:
    model = integer_model(stack(layers, width, seed, wants=wants))
    classes = classes_of(model, links)
    made, best = tie(model, classes), optimum(model)
    smaller, whole = Sweeper(made.model), Sweeper(model)
    for sweep in range(2 * pairs):
        if np.isinf(smaller.sweep(sweep % 2)):
            return
    for link, part in zip(whole.links, made.links, strict=True):
        assert part < 0 or sorted(made.of[list(link.ends)]) == sorted(smaller.links[part].ends)
    initialise_from_tied(smaller, whole, made.of, made.links)
    assert (_given(whole) == whole.weights).all()
    check_splits(whole)
    for sweep in range(6):
        assert whole.sweep(sweep % 2) <= best


def check_splits(sweeper: Sweeper, transfers: Sequence[Transfer] | None = None) -> None:
    """The shares that readers have of a price are not negative and add up to it. transfers: with other prices than the model's."""
    for index, transfer in enumerate(sweeper.model.transfers if transfers is None else transfers):
        total = np.zeros(transfer.prices.shape)
        for k, link in enumerate(sweeper.links):
            if link.transfer == index:
                table, layouts = sweeper.splits.table(k), np.unique(transfer.readers[link.reader][1])
                assert (table >= 0).all()
                total[np.ix_(np.unique(transfer.have), layouts)] += table if link.i == transfer.source else table.T
        cells = np.ix_(np.unique(transfer.have), np.unique(np.concatenate([want for _, want in transfer.readers])))
        assert (total[cells] == transfer.prices[cells]).all()


def test_the_shares_of_readers_never_exceed_the_price() -> None:
    """With few rounds of colouring, a value with five readers and four values with two are one class. The share of a reader of
    two is too large if there are five."""
    names, prices = np.arange(2), np.array([[0.0, 1000.0], [1000.0, 0.0]])
    sources, readers, last = range(5), range(5, 13), 13
    read = [[*readers[:4]], *([node] for node in readers[4:])]
    problem = PlacementProblem(
        (*(np.zeros(2) for _ in sources), *(np.ones(2) for _ in readers), np.array([2.0, 3.0])),
        transfers=tuple(Transfer(k, names, tuple((node, names) for node in (*read[k], last)), prices) for k in sources),
    )
    model = integer_model(problem)
    classes = classes_of(model, 0)
    assert classes.max() == 2
    made = tie(model, classes)
    smaller, whole = Sweeper(made.model), Sweeper(model)
    for k, link in enumerate(smaller.links):
        if link.transfer >= 0 and len(made.model.transfers[link.transfer].readers) > 1:
            table, transfer = smaller.splits.table(k), made.model.transfers[link.transfer]
            cells = np.ix_(np.unique(transfer.have), np.unique(transfer.readers[link.reader][1]))
            prices = np.where(np.isinf(transfer.prices[cells]), np.inf, np.where(link.reader == 0, transfer.prices[cells], 0.0))
            table[:] = prices if link.i == transfer.source else prices.T
    check_splits(smaller)
    initialise_from_tied(smaller, whole, made.of, made.links)
    check_splits(whole)


def _given(sweeper: Sweeper) -> np.ndarray:
    """Node costs plus all incoming messages, (states,)."""
    total = sweeper.theta.copy()
    for k, link in enumerate(sweeper.links):
        for end, node in enumerate(link.ends):
            begins = sweeper.wiring.message[1 - end]
            total[sweeper.offset[node] : sweeper.offset[node + 1]] += sweeper.messages[1 - end][begins[k] : begins[k + 1]][
                link.classes(end)
            ]
    return total


def test_messages_of_a_tied_model_make_the_whole_converge_sooner() -> None:
    """Compares the best bounds of 20 sweeps."""
    problem = stack(40, 2, 3)
    problem = replace(problem, node_costs=tuple(cost + np.arange(2) for cost in problem.node_costs))
    model = integer_model(problem)
    classes = classes_of(model, 3)
    assert classes.max() < 40 and len(classes) == 81
    made = tie(model, classes)
    smaller, whole, cold = Sweeper(made.model), Sweeper(model), Sweeper(model)
    for sweep in range(100):
        smaller.sweep(sweep % 2)
    initialise_from_tied(smaller, whole, made.of, made.links)
    bounds = [max(sweeper.sweep(sweep % 2) for sweep in range(20)) for sweeper in (whole, cold)]
    assert bounds[0] > bounds[1]


def test_a_proven_optimum_is_not_swept_again() -> None:
    model = integer_model(chain(30, 3, 4))
    relaxation = Relaxation(model, None, Budget(None, 1e9))
    relaxation.run()
    assert relaxation.bound == relaxation.cutoff
    left = relaxation.ascent.budget.work_left
    relaxation.run()
    assert relaxation.ascent.budget.work_left == left and relaxation.bound == relaxation.cutoff
