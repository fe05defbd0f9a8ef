"""Lowering: one graph where shards are even, the same collectives in every size class, each traced to the plan."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from passes.enumeration import TOY, Const, aten, build
from torch import fx, nn

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout, all_layouts
from fxshard.layout.redistribution import bytes_price
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.lowering.size_classes import cuts, level_sizes, size_classes
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning.choose import Decision, write_plan
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.program.sharded_program import KINDS, ShardedProgram, is_collective
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.testing.random_plan import random_graph_plan
from tests.reference_shards import coordinates, shard

L = Layout.parse


@cache
def mlp(batch: int, hidden: int) -> PlanningGraph:
    return trace(nn.Sequential(nn.Linear(8, hidden), nn.GELU(), nn.Linear(hidden, 8)), (torch.ones(batch, 8),))


def calls(module: fx.GraphModule, *targets: object) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.target in targets]


def issued(module: fx.GraphModule) -> list[tuple[str, str, tuple[int, ...], str]]:
    """(kind, axis, buffer, dtype) of the collectives in a graph."""
    nodes = [(n, n.args[0].meta["val"]) for n in calls(module, *KINDS)]
    return [(KINDS[n.target], n.args[-1], tuple(x.shape), str(x.dtype)) for n, x in nodes]


@pytest.mark.parametrize("axes", ["a=4", "a=2,b=2"])
@pytest.mark.parametrize("seed", range(6))
def test_even_shards_are_one_graph_without_padding(axes: str, seed: int) -> None:
    """Slices only split a buffer into equal blocks. The graph depends on the rank only by its axis index, unclamped."""
    graph, mesh = mlp(16, 32), parse_mesh(axes)
    program = lower(graph, random_graph_plan(annotate(graph, mesh), seed))
    (module,) = program.modules.values()
    assert set(program.classes) == set(coordinates(mesh.shape)) and set(program.classes.values()) == {()}
    assert not calls(module, aten.constant_pad_nd.default, aten.clamp_max.default, aten.narrow.default)
    for node in calls(module, aten.slice.Tensor):
        x, dim, start, _ = node.args
        block = node.meta["val"].shape[dim]
        assert x.meta["val"].shape[dim] in (2 * block, 4 * block) and start % block == 0


@pytest.mark.parametrize(("axes", "batch", "hidden"), [("a=4", 5, 10), ("a=4", 2, 7), ("a=2,b=2", 5, 7), ("a=3,b=2", 4, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_uneven_size_classes_issue_the_same_collectives(axes: str, batch: int, hidden: int, seed: int) -> None:
    graph, mesh = mlp(batch, hidden), parse_mesh(axes)
    program = lower(graph, random_graph_plan(annotate(graph, mesh), seed))
    assert len(program.modules) > 1
    expected = [(c.kind, c.axis, c.shape, c.dtype) for c in program.collectives]
    assert expected and all(issued(module) == expected for module in program.modules.values())
    for coordinate in mesh.coordinates():
        shapes = [tuple(n.meta["val"].shape) for n in program.local(coordinate).graph.nodes if n.op == "placeholder"]
        ends = zip(program.input_shapes, program.input_layouts, strict=True)
        assert shapes == [tuple(shard(torch.empty(s), layout, mesh.shape, coordinate).shape) for s, layout in ends]


def trace_back(program: ShardedProgram) -> None:
    """Each collective of the program is one step of one entry of the plan, and none is left out."""
    plan = program.plan
    for module in program.modules.values():
        assert [n.name for n in module.graph.nodes if is_collective(n)] == [c.node for c in program.collectives]
    for c in program.collectives:
        ((entry, number),) = c.serves
        step = plan.redistributions[entry].steps[number]
        assert (step.kind, plan.mesh.axis_names[step.axis]) == (c.kind, c.axis)
    planned = Counter((((c.entry, c.step),), c.kind, c.axis, c.bytes) for c in plan.collectives)
    assert planned == Counter((c.serves, c.kind, c.axis, c.bytes) for c in program.collectives)
    assert max(planned.values(), default=1) == 1


@pytest.mark.parametrize("axes", ["a=4", "a=2,b=2", "a=2,b=3"])
@pytest.mark.parametrize("batch", [8, 5])
def test_collectives_trace_back_to_the_plan(axes: str, batch: int) -> None:
    graph, mesh = mlp(batch, 12), parse_mesh(axes)
    annotated = annotate(graph, mesh)
    for seed in range(3):
        trace_back(lower(graph, random_graph_plan(annotated, seed)))
    pins = {"0.weight": {"a": L("S(0)")[0]}, "2.weight": {"a": L("S(1)")[0]}}
    trace_back(lower(graph, plan_graph(graph, mesh, Request(pins=pins, output_layouts="R" * mesh.ndim))))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_shared_redistribution_is_emitted_once(count: int) -> None:
    graph = build([(8, 8)], [(aten.relu.default, 0)] + [(aten.neg.default, 1)] * count, list(range(2, 2 + count)))
    pins = {"relu_default": "S(0)", "neg*": "R"}
    plan = plan_graph(graph, Mesh({"a": 4}, TOY), Request(pins=pins, output_layouts="R", input_layouts="S(0)"))
    program = lower(graph, plan)
    assert [(c.kind, c.node, len(plan.redistributions[c.serves[0][0]].readers)) for c in program.collectives] == [
        ("all_gather", "all_gather_into_tensor_default", count)
    ]


def test_results_in_different_layouts_share_no_redistribution() -> None:
    """One value returned in three layouts: its own, replicated, and sharded on the other dim."""
    graph, mesh = build([(8, 6)], [(aten.relu.default, 0)], [1, 1, 1]), Mesh({"a": 2})
    layout = L("S(0)")
    specs = {"input_0": OpSpec((), (layout,)), "relu_default": OpSpec((layout,), (layout,))}
    specs["output"] = OpSpec((layout, L("R"), L("S(1)")), ())
    program = lower(graph, write_plan(annotate(graph, mesh), Decision(specs), bytes_price, "bytes"))
    assert [c.kind for c in program.collectives] == ["all_gather", "all_to_all"]


def test_size_classes_are_the_distinct_sizes_of_shards() -> None:
    """Ranks are in one class when, for every tensor and at each level of nesting, they hold chunks of one size."""
    mesh = Mesh({"a": 2, "b": 3})
    tensors = [((7, 4), layout) for layout in all_layouts(2, (2, 2), ())] + [((12, 6), layout) for layout in all_layouts(2, (2, 2), ())]
    found = size_classes(cuts(tensors, mesh), mesh)
    sizes = {c: tuple(tuple(shard(torch.empty(s), layout, mesh.shape, c).shape) for s, layout in tensors) for c in mesh.coordinates()}
    for one in mesh.coordinates():
        for other in mesh.coordinates():
            assert (found[one] == found[other]) == (sizes[one] == sizes[other])
    assert cuts([((12, 6), L("S(0)S(1)"))], mesh) == ()
    assert cuts([((7,), L("S(0)S(0)"))], mesh) == ((7, (0, 1)),)
    assert [level_sizes((7, (0, 1)), mesh, c) for c in mesh.coordinates()] == [(4, 2), (4, 2), (4, 0), (3, 1), (3, 1), (3, 1)]


@pytest.mark.parametrize("rows", [6, 5])
def test_bools_travel_as_bytes(rows: int) -> None:
    """``x > 0``, sharded by rows, is returned replicated and sharded by columns."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    graph, mesh = build([(rows, 4)], [(aten.gt.Scalar, 0, Const(0))], [1, 1]), Mesh({"a": 2})
    layout = L("S(0)")
    specs = {"input_0": OpSpec((), (layout,)), "gt_scalar": OpSpec((layout,), (layout,)), "output": OpSpec((L("R"), L("S(1)")), ())}
    program = lower(graph, write_plan(annotate(graph, mesh), Decision(specs), bytes_price, "bytes"))
    kinds = [("all_gather", (3, 4)), ("all_to_all", (2, 3, 2))]
    assert [(c.kind, c.shape, c.dtype) for c in program.collectives] == [(kind, shape, "torch.uint8") for kind, shape in kinds]
    result = simulate_program(program, [x])
    for module in program.modules.values():
        assert [dtype for *_, dtype in issued(module)] == ["torch.uint8"] * 2
    for out in result.outputs:
        assert out.dtype == torch.bool and torch.equal(out, x > 0)
