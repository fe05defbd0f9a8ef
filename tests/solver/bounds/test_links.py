"""Equal tables are stored once, and results do not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxshard.solver import PlacementProblem, Transfer
from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.pruning import excess_of, find_slacks
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import from_problem


def layers(count: int, *, alike: bool) -> PlacementProblem:
    """A chain of equal pairs of nodes, whose arrays are shared if ``alike``, else copied. Every second value has two readers."""
    rng, states = np.random.default_rng(0), np.asarray([0, 1, 2, 1])
    costs = [rng.integers(0, 20, 4).astype(float) for _ in range(2)]
    prices = [rng.integers(1, 30, (3, 3)) * (1.0 - np.eye(3)) for _ in range(2)]
    edge = rng.integers(0, 9, (4, 4)).astype(float)
    transfers, edges = [], []
    for node in range(0, 2 * count - 2, 2):
        transfers.append(Transfer(node, states, ((node + 1, states), (node + 2, states)), prices[0]))
        transfers.append(Transfer(node + 1, states, ((node + 2, states),), prices[1]))
        transfers.append(Transfer(node + 2, states, ((node, states[::-1]),), prices[1]))
        edges.append((node, node + 3))
    if not alike:
        transfers = [
            replace(t, prices=t.prices.copy(), have=t.have.copy(), readers=tuple((n, w.copy()) for n, w in t.readers)) for t in transfers
        ]
    tables = tuple(edge if alike else edge.copy() for _ in edges)
    return PlacementProblem(tuple(costs[i % 2] for i in range(2 * count)), tuple(edges), tables, transfers=tuple(transfers))


def test_equal_tables_are_stored_once_and_change_nothing() -> None:
    ascents = [Ascent(from_problem(layers(12, alike=alike)), Budget(), lambda plan, cost: cost) for alike in (True, False)]
    shared, apart = (ascent.sweeper.splits for ascent in ascents)
    split = 11 * 2 * 9  # 3 x 3 tables of two readers are not shared
    assert len(apart.values) == apart.own[-1] == shared.own[-1] == split + 11 * (2 * 9 + 16)
    assert len(shared.values) == split + 2 * 9 + 16
    for _ in range(6):
        assert ascents[0].pair() == ascents[1].pair()
        assert [shared.table(k).tolist() for k in range(len(shared.links))] == [apart.table(k).tolist() for k in range(len(apart.links))]


def test_excess_is_the_same_without_tables() -> None:
    ascent = Ascent(from_problem(layers(12, alike=True)), Budget(), lambda plan, cost: cost)
    for _ in range(2):
        ascent.pair()
    state = ascent.sweeper.state()
    brief, bound = excess_of(ascent)
    ascent.sweeper.restore(state)
    slacks = find_slacks(ascent, bound + 8)
    assert slacks.room == 8 and slacks.constant == bound
    np.testing.assert_array_equal(np.where(brief < 8, brief, np.inf), slacks.excess)
    assert np.isfinite(slacks.excess).any() and np.isinf(slacks.excess).any()
