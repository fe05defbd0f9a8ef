"""Reductions of gradients become buckets that start once: what planning pays for them, and what runs."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan

SLOW_START = Hardware("slow start", {4: 1e9}, 1e9, 0.0, 64, Link(1e8, 1000.0), Link(1e8, 1000.0))
"""A hop takes a millisecond; a kilobyte takes 10 us to send and, written and read again, 2 us to pack where it is not computed there."""
SIZE, LAYERS, BYTES = 16, 6, 1024
SHARED = 10 / 9
"""A bucket is full when it takes ten starts, nine of them for its bytes: each byte pays a ninth of its time more."""


@cache
def chain() -> PlanningGraph:
    """Six products with weights of a kilobyte each."""
    return trace(nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))), (torch.randn(8, SIZE),))


def plan_of(graph: PlanningGraph, mesh: Mesh, weights: str, rows: str) -> ShardingPlan:
    """Each rank sums the gradients of its rows."""
    returned = {o.name for o in graph.module.graph.output_node().all_input_nodes[1:]}
    pins = {n.name: "P" * mesh.ndim if n.name in returned else rows for n in graph.nodes if "einsum" in n.name}
    pins |= {end.node: weights for end in graph.inputs_of("parameter")}
    return plan_graph(graph, mesh, Request(pins=pins, input_layouts=rows, output_layouts=rows))


def paid(plan: ShardingPlan, *kinds: str) -> list[float]:
    """Microseconds of the redistributions that use one of these collectives."""
    return [r.cost for r in plan.redistributions if any(step.kind in kinds for step in r.steps)]


def test_a_gradient_pays_its_bytes() -> None:
    """An all-reduce on two ranks: 2 hops, which a full bucket shares, as many bytes as the buffer has, in which it is computed."""
    graph = chain()
    plan = plan_of(graph, Mesh({"a": 2}, SLOW_START), "R", "S(0)")
    assert [c.kind for c in plan.collectives] == ["all_reduce"] * LAYERS
    assert paid(plan, "all_reduce") == pytest.approx([SHARED * BYTES / 1e8 * 1e6] * LAYERS)
    program = lower_plan(graph, plan)
    assert [c.kind for c in program.collectives] == ["all_reduce"], "they are one, as was paid for"


def test_what_parameters_are_brought_by_is_joined_too() -> None:
    """Weights cut, gathered for their readers and reduced as gradients: on two ranks one hop each, and half of the bytes. What is
    gathered is packed as two blocks and taken apart: three times the bytes of a reduction's buffer, read and written."""
    graph = chain()
    plan = plan_of(graph, Mesh({"a": 2}, SLOW_START), "S(0)", "S(0)")
    sent = SHARED * BYTES / 2 / 1e8 * 1e6
    gathers, reductions = paid(plan, "all_gather"), paid(plan, "reduce_scatter")
    assert gathers == pytest.approx([sent + 3 * BYTES / 1e9 * 1e6] * LAYERS)
    assert reductions == pytest.approx([sent + 2 * BYTES / 1e9 * 1e6] * LAYERS)
    program = lower_plan(graph, plan)
    assert [c.kind for c in program.collectives] == ["all_gather", "reduce_scatter"], "each is one, as was paid for"


def test_what_is_computed_and_read_pays_its_start() -> None:
    """The rows of a hidden value are gathered in front of the next product: nobody else waits there."""
    graph = chain()
    values = [n.name for n in graph.nodes if "einsum" in n.name][:2]
    plan = plan_graph(graph, Mesh({"a": 2}, SLOW_START), Request(pins={values[0]: "S(0)", values[1]: "R"}, input_layouts="S(0)"))
    assert max(paid(plan, "all_gather")) >= 1000


def test_one_after_another_pays_all_starts() -> None:
    """On two axes a gradient is cut along one, all-reduced along the other and gathered: each waits for the one before, and may
    not meet others. Together four hops, and three times half of the bytes."""
    graph = chain()
    plan = plan_of(graph, Mesh({"a": 2, "b": 2}, SLOW_START), "RR", "S(0)S(0)")
    assert paid(plan, "all_reduce") == pytest.approx([4 * 1000 + 3 * BYTES / 2 / 1e8 * 1e6] * LAYERS)


def test_a_full_bucket_is_sent_on() -> None:
    """A start of 100 us, 369 us for each gradient of 36 KiB: three of them take more than ten starts."""
    quick = Hardware("quick start", {4: 1e9}, 1e12, 0.0, 64, Link(1e8, 50.0), Link(1e8, 50.0))
    graph = trace(nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(LAYERS))), (torch.randn(8, 96),))
    program = lower_plan(graph, plan_of(graph, Mesh({"a": 2}, quick), "R", "S(0)"))
    assert [(c.kind, c.shape) for c in program.collectives] == [("all_reduce", (3 * 96 * 96,))] * (LAYERS // 3)


def test_an_axis_of_one_rank_joins_nothing() -> None:
    graph = chain()
    mesh = Mesh({"a": 1, "b": 2}, SLOW_START)
    program = lower_plan(graph, plan_of(graph, mesh, "S(0)S(0)", "S(0)S(0)"))
    assert {c.axis for c in program.collectives if c.bytes} == {"b"}
