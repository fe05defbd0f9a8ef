"""Odd sizes on large meshes: one graph for all ranks, which does not grow with the mesh, compared with one device in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from passes.any_size import traced
from passes.lowering.test_empty_shards_any_size import Frozen
from passes.lowering.test_lower_any_size import equals_one_device
from torch import nn

from fxshard.layout.layouts import Layout, local_shape
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.program.verify_program import verify_program
from fxshard.shapes import dynamic_dims
from fxshard.testing.random_plan import random_graph_plan

SIZES = ((1, 1), (5, 3), (17, 19), (37, 36), (36, 1))
"""Batch and length: 1, less than the 18 ranks of an axis, one less and one more than a multiple of 18, and a multiple."""


@cache
def lowered(name: str, mesh: tuple[tuple[str, int], ...], seed: int) -> tuple[nn.Module, ShardedProgram]:
    model, graph = traced(name, 40, 38, uneven=True)
    return model, lower_plan(graph, random_graph_plan(annotate(graph, Mesh(dict(mesh))), seed))


SLOW = pytest.mark.slow
LINE, PLANE, SMALL = (("a", 18),), (("a", 4), ("b", 5)), (("a", 2), ("b", 3))
GRAPHS = ("perceptron", "flattened")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in (1, 2, 3))])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("perceptron", LINE),
        ("flattened", SMALL),
        pytest.param("flattened", LINE, marks=SLOW),
        *(pytest.param(name, PLANE, marks=SLOW) for name in GRAPHS),
    ],
    ids=str,
)
def test_equal_to_one_device(name: str, mesh: tuple[tuple[str, int], ...], seed: int) -> None:
    model, program = lowered(name, mesh, seed)
    assert program.ranks
    verify_program(program)
    for sizes in SIZES:
        assert equals_one_device(program, name, model, *sizes)


@pytest.mark.slow
def test_64_ranks() -> None:
    model, program = lowered("perceptron", (("a", 64),), 0)
    for batch in (1, 63, 65, 130):
        assert equals_one_device(program, "perceptron", model, batch, 1)


@pytest.mark.parametrize("name", ["perceptron", "flattened"])
def test_graphs_do_not_grow_with_the_mesh(name: str) -> None:
    """Plans drawn with one seed have as many calls for 96 ranks as for 24, except for a few where other specs are legal."""
    _, graph = traced(name, 40, 38, uneven=True)
    counts = []
    for ranks in (24, 96):
        program = lower(graph, random_graph_plan(annotate(graph, Mesh({"a": ranks})), 0))
        counts.append(max(len(module.graph.nodes) for module in program.modules.values()))
        assert len(program.modules) <= 4  # size classes of the static dims
    assert counts[1] < 1.2 * counts[0], counts


def test_a_condition_on_64_ranks_is_one_guard() -> None:
    """It is evaluated for each rank when a size is checked, and agrees with the lengths of the ranks' shards."""
    args = (torch.randn(100, 3).double(),)
    dims = tuple(replace(d, uneven=True) for d in dynamic_dims(Frozen(), args, {}, ({0: "n"},)))
    graph, mesh = trace(Frozen(), args, dynamic=dims), Mesh({"a": 8, "b": 8})
    pins = {"native_batch_norm_backward": ("S(0)S(0)", None, None)}
    program = lower_plan(graph, plan_graph(graph, mesh, Request(pins=pins, input_layouts="S(0)S(0)", cache=False)))
    assert [len(guard.ranks) for guard in program.guards] == [2]
    layout = Layout.parse("S(0)S(0)")
    shards = {n: [local_shape((n,), layout, mesh.shape, c) for c in mesh.coordinates()] for n in (7, 63, 64, 65, 120, 127, 128)}
    assert [n for n in shards if program.refuses({"n": n}) is None] == [n for n, each in shards.items() if (0,) not in each] != []
