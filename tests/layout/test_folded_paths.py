"""Paths through folded layouts: each is run and compared with whole tensors; no path of legal steps is cheaper than the chosen one."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard.cost import time_price
from fxshard.layout.folded_paths import folded_paths
from fxshard.layout.layouts import FoldedShard, Layout, all_layouts
from fxshard.layout.redistribution import (
    Price,
    Step,
    bytes_price,
    is_legal,
    path_bytes,
    path_table_for,
    single_step,
    step_price,
    steps,
    walk,
)
from fxshard.layout.steps import reductions_commute
from fxshard.mesh.mesh import Mesh, parse_mesh
from tests.moved import Steps, run

L = Layout.parse


@pytest.mark.parametrize("ops", [("sum",), ("avg", "max")], ids="+".join)
@pytest.mark.parametrize(
    ("axes", "shape", "most"),
    [
        ("a=2,b=2", (8, 4), 80),
        ("a=2,b=3", (12, 6), 80),
        ("a=3,b=2", (7, 5), 80),
        ("a=2,b=2", (3, 1, 6), 80),
        ("a=2,b=2,c=2", (8, 16), 40),
        ("a=2,b=3,c=2", (5, 9), 40),
    ],
)
def test_each_path_is_right(axes: str, shape: tuple[int, ...], most: int, ops: tuple[str, ...]) -> None:
    mesh = parse_mesh(axes)
    every = list(folded_paths(list(filter(reductions_commute, all_layouts(len(shape), mesh.shape, ops))), len(shape), range(mesh.ndim)))
    found: dict[Layout, list[Steps]] = {}
    for way in random.Random(0).sample(every, min(most, len(every))):
        assert all(at.is_folded for _, _, at in way[:-1]) and not way[-1][2].is_folded
        found.setdefault(way[0][0], []).append(tuple(step for _, step, _ in way))
    for source, paths in found.items():
        run(source, paths, shape, mesh)


@pytest.mark.parametrize(
    ("source", "target", "kinds", "share"),
    [
        ("S(0)S(0)", "S(1)S(1)", ["all_to_all", "all_to_all"], 1 / 8 + 1 / 8),
        ("S(0)S(0)", "S(1)R", ["all_to_all", "all_gather"], 1 / 8 + 1 / 4),
        ("S(0)R", "S(1)S(1)", ["slice", "all_to_all"], 1 / 8),
        ("PR", "S(0)S(0)", ["slice", "reduce_scatter"], 1 / 4),
        ("S(0)P", "S(1)S(1)", ["reduce_scatter", "all_to_all"], 1 / 4 + 1 / 8),
        ("S(0)S(0)", "RS(0)", ["all_to_all", "all_gather", "all_to_all"], 1 / 8 + 1 / 4 + 1 / 4),
    ],
)
def test_known_paths(source: str, target: str, kinds: list[str], share: float) -> None:
    """Bytes in shares of the whole tensor, worked out by hand on 2 x 2 ranks."""
    mesh, shape = Mesh({"a": 2, "b": 2}), (32, 16)
    found = steps(L(source), L(target), shape, 4, mesh)
    assert [step.kind for step in found] == kinds
    sent = sum(step_price(step, at, shape, 4, mesh, bytes_price) for at, step, _ in walk(L(source), found))
    assert sent == share * 32 * 16 * 4 == sum(path_bytes(L(source), L(target), shape, 4, mesh, bytes_price, axis) for axis in (0, 1))


def test_shards_of_two_axes_are_gathered_over_the_slow_links_first() -> None:
    mesh = Mesh({"node": 4, "gpu": 8}, "h100")
    gathered = steps(L("S(0)S(0)"), L("RR"), (4096, 4096), 4, mesh, time_price(mesh))
    scattered = steps(L("PP"), L("S(0)S(0)"), (4096, 4096), 4, mesh, time_price(mesh))
    assert [(s.kind, s.axis) for s in gathered] == [("all_gather", 0), ("all_gather", 1)]
    assert [(s.kind, s.axis) for s in scattered] == [("reduce_scatter", 1), ("reduce_scatter", 0)]


def next_to(layout: Layout, ndim: int) -> Iterator[tuple[Step, Layout]]:
    """Every legal step, folded layouts of any nesting included."""
    axes = range(len(layout))
    nests = [nest for count in axes for nest in itertools.combinations(axes, count + 1)]
    dims = range(ndim)
    targets = [Replicate(), Partial("sum"), *map(Shard, dims), *(FoldedShard(d, nest) for d in dims for nest in nests)]
    for axis, target in itertools.product(axes, targets):
        step = single_step(axis, layout[axis], target)
        if step is not None and is_legal(step, layout):
            yield step, step.after(layout)


def cheapest(source: Layout, shape: tuple[int, ...], mesh: Mesh, price: Price) -> dict[Layout, float]:
    """By Dijkstra over all layouts, folded ones too."""
    best, done, queue, order = {source: 0.0}, set(), [(0.0, 0, source)], itertools.count(1)
    while queue:
        paid, _, layout = heapq.heappop(queue)
        if layout in done:
            continue
        done.add(layout)
        for step, after in next_to(layout, len(shape)):
            total = paid + step_price(step, layout, shape, 4, mesh, price)
            if total < best.get(after, math.inf):
                best[after] = total
                heapq.heappush(queue, (total, next(order), after))
    return best


@pytest.mark.parametrize("kind", ["bytes", "time"])
@pytest.mark.parametrize(
    ("axes", "shape", "sources"),
    [
        ("a=2,b=3", (12, 6), 16),
        ("a=2,b=2", (5, 3, 4), 12),
        ("a=8,b=8", (4096, 512), 16),
        ("a=2,b=2,c=2", (9, 3), 3),
        ("a=2,b=8,c=2", (64, 16), 3),
    ],
)
def test_no_path_of_legal_steps_is_cheaper(axes: str, shape: tuple[int, ...], sources: int, kind: str) -> None:
    mesh = parse_mesh(axes, "h100")
    price = bytes_price if kind == "bytes" else time_price(mesh)
    every = all_layouts(len(shape), mesh.shape)
    paths = path_table_for(every, shape, 4, mesh, price)
    for source in random.Random(3).sample(every, min(sources, len(every))):
        best = cheapest(source, shape, mesh, price)
        for target in every:
            paid = paths.prices[paths.index[source], paths.index[target]]
            assert math.isclose(paid, best[target], rel_tol=1e-9, abs_tol=1e-6), f"{source} -> {target}"
