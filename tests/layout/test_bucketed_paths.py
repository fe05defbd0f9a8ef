"""Paths whose collective joins a bucket: a path of one such step, if with its saving it costs less than the cheapest path."""

from __future__ import annotations

import numpy as np
import pytest

from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price, bucketed_path, path_table, steps
from fxshard.layout.steps import Step
from fxshard.mesh.mesh import Mesh

PRICES = {"all_reduce": 10.0, "reduce_scatter": 4.0, "all_gather": 5.0, "all_to_all": 6.0}
SHAPE, ITEM = (8, 8), 4


def price(step: Step, sent: int, written: int) -> float:
    return PRICES.get(step.kind, 0.0)


def saving(kinds: dict[str, float]) -> Price:
    return lambda step, sent, written: kinds.get(step.kind, 0.0)


def kinds(source: str, target: str, mesh: Mesh, saved: dict[str, float]) -> tuple[list[str], float]:
    path, cost = bucketed_path(Layout.parse(source), Layout.parse(target), SHAPE, ITEM, mesh, price, saving(saved))
    return [step.kind for step in path], cost


@pytest.mark.parametrize(
    ("saved", "path", "cost"),
    [
        ({}, ["reduce_scatter", "all_gather"], 9.0),
        ({"all_reduce": 8.0}, ["all_reduce"], 2.0),
        ({"all_reduce": 0.5}, ["reduce_scatter", "all_gather"], 9.0),
        ({"reduce_scatter": 3.0, "all_gather": 4.0}, ["reduce_scatter", "all_gather"], 9.0),
    ],
)
def test_an_all_reduce_on_one_axis(saved: dict[str, float], path: list[str], cost: float) -> None:
    """A path of one collective saves; two collectives in a row wait for each other and save nothing."""
    assert kinds("P", "R", Mesh({"a": 2}), saved) == (path, cost)


def test_a_path_on_two_axes_saves_nothing() -> None:
    path, cost = kinds("PP", "RR", Mesh({"a": 2, "b": 2}), {"all_reduce": 8.0})
    assert len(path) > 1 and cost == 18.0, "a reduce-scatter and an all-gather on each axis"


def test_the_table_agrees_with_single_paths() -> None:
    mesh, saved = Mesh({"a": 2, "b": 2}), saving({"all_reduce": 8.0, "all_gather": 3.0})
    paths = path_table(SHAPE, ITEM, mesh, ("sum",), price)
    found = paths.bucketed(saved)
    cheaper = 0
    for i, source in enumerate(paths.layouts):
        for j, target in enumerate(paths.layouts):
            if i == j or not np.isfinite(paths.prices[i, j]):
                continue
            path, cost = bucketed_path(source, target, SHAPE, ITEM, mesh, price, saved)
            assert found[i, j] == pytest.approx(cost)
            assert cost <= paths.prices[i, j] + 1e-6
            cheaper += path != steps(source, target, SHAPE, ITEM, mesh, price)
    assert cheaper
