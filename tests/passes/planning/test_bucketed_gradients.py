"""Reductions of gradients are joined in buckets, which pay the latency once: what the planner charges for them, and what runs."""

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
"""A hop takes a millisecond. A kilobyte takes 10 us to send, and 2 us to pack (read and written) unless it is computed in the bucket."""
SIZE, LAYERS, BYTES = 16, 6, 1024
SHARED = 10 / 9
"""A full bucket takes ten times the latency, nine of them for its bytes, so each byte costs 10/9 of its transfer time."""


@cache
def chain() -> PlanningGraph:
    """Six products with weights of a kilobyte each."""
    return trace(nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))), (torch.randn(8, SIZE),))


def plan_of(graph: PlanningGraph, mesh: Mesh, weights: str, rows: str) -> ShardingPlan:
    """A plan in which each rank sums the gradients over its rows, so that they are pending."""
    returned = {o.name for o in graph.module.graph.output_node().all_input_nodes[1:]}
    pins = {n.name: "P" * mesh.ndim if n.name in returned else rows for n in graph.nodes if "einsum" in n.name}
    pins |= {end.node: weights for end in graph.inputs_of("parameter")}
    return plan_graph(graph, mesh, Request(pins=pins, input_layouts=rows, output_layouts=rows))


def paid(plan: ShardingPlan, *kinds: str) -> list[float]:
    """Microseconds of the redistributions that use one of these collectives."""
    return [r.cost for r in plan.redistributions if any(step.kind in kinds for step in r.steps)]


def test_a_gradient_pays_its_bytes() -> None:
    """An all-reduce on two ranks takes 2 hops, which a full bucket shares. It sends the whole buffer, which is computed in the bucket."""
    graph = chain()
    plan = plan_of(graph, Mesh({"a": 2}, SLOW_START), "R", "S(0)")
    assert [c.kind for c in plan.collectives] == ["all_reduce"] * LAYERS
    assert paid(plan, "all_reduce") == pytest.approx([SHARED * BYTES / 1e8 * 1e6] * LAYERS)
    program = lower_plan(graph, plan)
    assert [c.kind for c in program.collectives] == ["all_reduce"], "the gradients share one all-reduce, as planned"


def test_gathers_of_parameters_are_joined_too() -> None:
    """Sharded weights are gathered, and their gradients reduce-scattered: on two ranks one hop each, and half of the bytes.

    A gather packs one shard and unpacks two, a reduction packs the whole gradient; each of these bytes is read and written.
    """
    graph = chain()
    plan = plan_of(graph, Mesh({"a": 2}, SLOW_START), "S(0)", "S(0)")
    sent = SHARED * BYTES / 2 / 1e8 * 1e6
    gathers, reductions = paid(plan, "all_gather"), paid(plan, "reduce_scatter")
    assert gathers == pytest.approx([sent + 3 * BYTES / 1e9 * 1e6] * LAYERS)
    assert reductions == pytest.approx([sent + 2 * BYTES / 1e9 * 1e6] * LAYERS)
    program = lower_plan(graph, plan)
    assert [c.kind for c in program.collectives] == ["all_gather", "reduce_scatter"], (
        "the gathers share one, and the reductions share one, as planned"
    )


def test_an_activation_pays_its_latency() -> None:
    """It is gathered right before the product that reads it, where there is no other collective to join."""
    graph = chain()
    values = [n.name for n in graph.nodes if "einsum" in n.name][:2]
    plan = plan_graph(graph, Mesh({"a": 2}, SLOW_START), Request(pins={values[0]: "S(0)", values[1]: "R"}, input_layouts="S(0)"))
    assert max(paid(plan, "all_gather")) >= 1000


def test_collectives_in_a_row_pay_each_latency() -> None:
    """On two axes a gradient is scattered on one, all-reduced on the other and gathered. Each collective waits for the one before, so
    none is joined. Together they take four hops and send three times half of the bytes."""
    graph = chain()
    plan = plan_of(graph, Mesh({"a": 2, "b": 2}, SLOW_START), "RR", "S(0)S(0)")
    assert paid(plan, "all_reduce") == pytest.approx([4 * 1000 + 3 * BYTES / 2 / 1e8 * 1e6] * LAYERS)


def test_a_full_bucket_is_closed() -> None:
    """The latency is 100 us, and each gradient of 36 KiB takes 369 us, so three of them take more than ten times the latency."""
    quick = Hardware("quick start", {4: 1e9}, 1e12, 0.0, 64, Link(1e8, 50.0), Link(1e8, 50.0))
    graph = trace(nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(LAYERS))), (torch.randn(8, 96),))
    program = lower_plan(graph, plan_of(graph, Mesh({"a": 2}, quick), "R", "S(0)"))
    assert [(c.kind, c.shape) for c in program.collectives] == [("all_reduce", (3 * 96 * 96,))] * (LAYERS // 3)


def test_an_axis_of_one_rank_joins_nothing() -> None:
    graph = chain()
    mesh = Mesh({"a": 1, "b": 2}, SLOW_START)
    program = lower_plan(graph, plan_of(graph, mesh, "S(0)S(0)", "S(0)S(0)"))
    assert {c.axis for c in program.collectives if c.bytes} == {"b"}
