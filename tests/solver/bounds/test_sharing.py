"""Prices of transfers are split between their readers: the parts add up to the price, and any split gives a bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem, Row, Transfer
from fxshard.solver.bounds.multipliers import RowPrices
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, from_problem
from tests.solver.problems import integer_model, optimum, swept, with_rows, with_transfers


def allowed(problem: PlacementProblem) -> Model | None:
    """The model without forbidden states, which sweeps require; None if nothing is left."""
    try:
        return Relaxation(integer_model(problem), None, Budget()).ascent.model
    except Exhausted:
        return None


@settings(max_examples=100)
@given(with_transfers())
def test_the_bound_with_transfers_is_valid_after_every_sweep(problem: PlacementProblem) -> None:
    model = allowed(problem)
    if model is None:
        return
    for sweeper in swept(model, 8):
        check_splits(sweeper)


def check_splits(sweeper: Sweeper) -> None:
    """The shares of a price that readers of a layout have add up to the price."""
    for index, transfer in enumerate(sweeper.model.transfers):
        total, wanted = np.zeros(transfer.prices.shape), np.zeros(transfer.prices.shape, dtype=bool)
        for k, link in enumerate(sweeper.links):
            if link.transfer == index:
                table = sweeper.splits.table(k) if link.i == transfer.source else sweeper.splits.table(k).T
                cells = np.ix_(np.unique(transfer.have), np.unique(transfer.readers[link.reader][1]))
                assert (table >= 0).all()
                total[cells] += table
                wanted[cells] = True
        np.testing.assert_array_equal(total[wanted], transfer.prices[wanted])


@settings(max_examples=100)
@given(with_rows(memory=True), st.integers(0, 2**32))
def test_changed_prices_are_split_too(problem: PlacementProblem, seed: int) -> None:
    model = allowed(problem)
    if model is None:
        return
    sweeper, rows, rng = Sweeper(model), RowPrices(model), np.random.default_rng(seed)
    for times in (1.0, 5.0, 0.5, 0.0):
        sweeper.sweep(0)
        sweeper.sweep(1)
        multipliers = rows.round(rng.random(len(model.limits)) * times)
        sweeper.set_costs(sweeper.theta.copy(), rows.rates(multipliers))
        sweeper.model = replace(model, transfers=rows.transfers(multipliers) or model.transfers)
        check_splits(sweeper)
        assert sweeper.sweep(0) <= optimum(sweeper.model)


@settings(max_examples=60)
@given(with_transfers(), st.integers(0, 2**32))
def test_the_bound_is_valid_for_any_split(problem: PlacementProblem, seed: int) -> None:
    model = allowed(problem)
    if model is None:
        return
    sweeper, rng = Sweeper(model), np.random.default_rng(seed)
    sweeper.splits.rebalance(np.floor(rng.random(len(sweeper.splits.values)) * 20))
    assert sweeper.sweep(1) <= optimum(model)


def test_readers_are_charged_price_and_uses() -> None:
    """By hand: two readers want any of three layouts, and a row charges a rate per unit. Products are rounded down to integers."""
    prices = np.array([[0.0, 50.0, 70.0], [10.0, 0.0, 20.0], [90.0, 90.0, 0.0]])
    amounts = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]])
    any_layout = np.arange(3)
    transfer = Transfer(1, any_layout, ((0, any_layout), (2, any_layout)), prices)
    row = Row(0.0, transfers=((0, amounts),), slope=7.0)
    sweeper = Sweeper(from_problem(PlacementProblem((np.zeros(3),) * 3, transfers=(transfer,), rows=(row,))))
    for rate in (2.5, 7.0, 0.0):
        sweeper.set_costs(sweeper.theta.copy(), np.array([rate]))
        before, behind = sweeper.splits.table(0).T, sweeper.splits.table(1)
        missing = prices + rate * amounts - (before + behind)
        assert (missing >= 0).all() and (missing <= 1).all()
