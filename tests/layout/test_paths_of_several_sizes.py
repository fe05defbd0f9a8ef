"""A tensor with several example sizes has one path between two layouts: the one with the lowest mean cost."""

from __future__ import annotations

import itertools

import pytest

from fxshard.cost import time_price
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import WeightedShapes, path_communication, path_price, path_table, steps
from fxshard.layout.steps import step_price, walk
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh

START = Hardware("start", {4: 1e8}, 1e9, 0.0, 64, Link(1e9, 20.0), Link(1e8, 1.0))
"""With its high latency, small tensors take a path of few steps, large ones a path of few bytes."""
MESH = Mesh({"a": 2, "b": 2}, START)
PRICE = time_price(MESH)
SMALL, LARGE = (8, 8), (512, 512)


def along(source: Layout, way: tuple, shape: tuple[int, ...]) -> float:
    return sum(step_price(step, at, shape, 4, MESH, PRICE) for at, step, _ in walk(source, way))


def pairs() -> list[tuple[Layout, Layout]]:
    paths = path_table(SMALL, 4, MESH, ("sum",), PRICE)
    return [(a, b) for a, b in itertools.permutations(paths.layouts, 2) if paths.prices[paths.index[a], paths.index[b]] < float("inf")]


@pytest.mark.parametrize("weight", [0.001, 0.2, 0.9, 0.9999])
def test_no_path_for_one_size_is_cheaper_in_the_mean(weight: float) -> None:
    shapes = WeightedShapes((SMALL, LARGE), (weight, 1 - weight))
    for a, b in pairs():
        way = steps(a, b, shapes, 4, MESH, PRICE)
        mean = weight * along(a, way, SMALL) + (1 - weight) * along(a, way, LARGE)
        assert path_price(a, b, shapes, 4, MESH, PRICE) == pytest.approx(mean)
        for other in (steps(a, b, SMALL, 4, MESH, PRICE), steps(a, b, LARGE, 4, MESH, PRICE)):
            assert mean <= (weight * along(a, other, SMALL) + (1 - weight) * along(a, other, LARGE)) * (1 + 1e-6) + 1e-6


def test_the_weights_choose_between_different_paths() -> None:
    differ = [(a, b) for a, b in pairs() if steps(a, b, SMALL, 4, MESH, PRICE) != steps(a, b, LARGE, 4, MESH, PRICE)]
    assert differ
    for (a, b), (weight, shape) in itertools.product(differ, [(1 - 1e-9, SMALL), (1e-9, LARGE)]):
        shapes = WeightedShapes((SMALL, LARGE), (weight, 1 - weight))
        assert steps(a, b, shapes, 4, MESH, PRICE) == steps(a, b, shape, 4, MESH, PRICE)


def test_the_cost_of_collectives_is_known_for_each_size() -> None:
    shapes, (a, b) = WeightedShapes((SMALL, LARGE), (0.5, 0.5)), (Layout.parse("S(0)R"), Layout.parse("RS(1)"))
    way = steps(a, b, shapes, 4, MESH, PRICE)
    each = [sum(step_price(s, at, n, 4, MESH, PRICE) for at, s, _ in walk(a, way) if s.is_collective) for n in (SMALL, LARGE)]
    assert list(path_communication(a, b, shapes, 4, MESH, PRICE)) == pytest.approx(each)
    paths = path_table(shapes, 4, MESH, ("sum",), PRICE)
    assert list(paths.communication[:, paths.index[a], paths.index[b]]) == pytest.approx(each)
