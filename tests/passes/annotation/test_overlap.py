"""Gathers of parameters and reductions of gradients hidden behind compute: compared with enumeration and by hand."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from passes.enumeration import FAST, TOY, Const, Enumeration, build, graphs, ops
from passes.overlap_truth import Truth
from passes.planning.test_formulate import _inputs, _pinned, brute, check_optimal
from torch import nn
from zoo import llama

from fxshard.cost import time_price
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning.choose import Decision, write_plan
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.testing.random_plan import random_graph_plan

L = Layout.parse
MESHES = [Mesh({"a": n}, replace(h, overlap=share)) for h in (TOY, FAST) for n, share in ((2, 0.5), (4, 1.0))]
ROUND = Hardware("round", {4: 1e9}, 1e12, 0.0, 64, Link(1e8, 0.0), Link(1e8, 0.0), overlap=0.5)
"""1000 FLOP take a microsecond, and so do 100 bytes sent; memory is fast enough not to matter."""
SENT = 8 * 16 * 4 / 100
"""Microseconds of an all-gather or a reduce-scatter of 16 x 16 floats on two ranks of ``ROUND``."""


def product(rows: int) -> float:
    """Microseconds of a product of [rows, 16] and [16, 16], sharded by rows on two ranks."""
    return 2 * rows / 2 * 16 * 16 / 1000


def hidden(plan: ShardingPlan) -> list[tuple[str, float]]:
    return [("+".join(s.kind for s in r.steps), r.hidden) for r in plan.redistributions]


@brute(60)
@given(graphs(3, parameters=2), st.sampled_from(MESHES), st.data())
def test_forward_plans_are_optimal(graph: PlanningGraph, mesh: Mesh, data: st.DataObject) -> None:
    """Parameters are sharded, inputs and outputs replicated: the plan chooses what is gathered, and beside which compute."""
    pins = {end.node: data.draw(st.sampled_from(["S(0)", "S(1)"])) for end in graph.inputs_of("parameter")}
    plan = plan_graph(graph, mesh, Request(pins=pins, input_layouts="R", output_layouts="R"))
    truth = Enumeration(annotate(graph, mesh), "time", _pinned(pins | _inputs(graph, "R")), lambda k, x: x == L("R"))
    check_optimal(plan, truth)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m}-{m.hardware.name}")
@pytest.mark.parametrize("limit", [None, 2000])
def test_training_plans_are_optimal(mesh: Mesh, limit: int | None) -> None:
    graph = trace(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False)), (torch.randn(16, 8),))
    pins = {end.node: "S(0)" for end in graph.inputs_of("parameter")} | _inputs(graph, "S(0)")
    plan = plan_graph(graph, mesh, Request(pins=pins, memory_limit=limit))
    assert sum(plan.hidden.values()) > 0
    check_optimal(plan, Enumeration(annotate(graph, mesh), "time", _pinned(pins), memory_limit=limit))


@pytest.mark.parametrize("rows", [8, 64])
def test_by_hand_forward(rows: int) -> None:
    """x w v on two ranks, all sharded by rows. The product x w hides the gather of v for as long as it runs; nothing hides that of w."""
    calls = [(ops.einsum.default, 0, 1, Const("mk,kn->mn")), (ops.einsum.default, 3, 2, Const("mk,kn->mn"))]
    graph = build([(rows, 16), (16, 16), (16, 16)], calls, [4], 2)
    pins = {"parameter_1": "S(0)", "parameter_2": "S(0)", "einsum_default": "S(0)", "einsum_default_1": "S(0)"}
    plan = plan_graph(graph, Mesh({"a": 2}, ROUND), Request(pins=pins, input_layouts="S(0)", output_layouts="S(0)"))
    beside = 0.5 * min(product(rows), SENT)
    assert (beside == 0.5 * SENT) == (rows == 64)
    assert hidden(plan) == [("all_gather", 0.0), ("all_gather", pytest.approx(beside))]
    assert plan.hidden == pytest.approx({"gathers": beside})
    assert plan.objective == pytest.approx(2 * product(rows) + 2 * SENT - beside) and plan.gap == 0


@pytest.mark.parametrize("rows", [8, 64])
def test_by_hand_backward(rows: int) -> None:
    """FSDP of three layers. The products y1, y2, y3 read w1, w2, w3; then come d2 (reads w3), g3, d1 (reads w2), g2, g1, of equal cost.

    Time has nine segments: an empty one before the first product, then one for each product. The transfers that may run in a segment
    share it equally. In the second these are 4 (w2, w3, w3 for d2, w2 for d1), then 3, 2, 1, 1, 1, 1 and 2. So w2 has a quarter of the
    second, w3 as much and a third of the next, w1 nothing. g3 has the seventh, the eighth and half of the ninth, g2 the other half,
    g1 nothing.
    """
    graph = trace(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))), (torch.randn(rows, 16),))
    products = [n for n in graph.nodes if "einsum" in n.name]
    returned = {o.name for o in graph.module.graph.output_node().all_input_nodes[1:]}
    assert [n.name in returned for n in products] == [False, False, False, False, True, False, True, True]
    pins = {n.name: "P" if n.name in returned else "S(0)" for n in products} | {e.node: "S(0)" for e in graph.inputs_of("parameter")}
    plan = plan_graph(graph, Mesh({"a": 2}, ROUND), Request(pins=pins, input_layouts="S(0)", output_layouts="S(0)"))
    gathers, reductions = ([0.5 * min(product(rows) * part, SENT) for part in parts] for parts in ([0, 1 / 4, 7 / 12], [5 / 2, 1 / 2, 0]))
    assert [h for kind, h in hidden(plan) if kind == "all_gather"] == pytest.approx(gathers)
    assert [h for kind, h in hidden(plan) if kind == "reduce_scatter"] == pytest.approx(reductions[::-1]), "in the order of the results"
    assert plan.objective == pytest.approx(8 * product(rows) + 6 * SENT - sum(gathers + reductions)) and plan.gap == 0
    assert f"assumes {sum(gathers):.4g} us of gathers and {sum(reductions):.4g} us of reductions hidden" in str(plan)


def test_an_all_reduce_is_hidden_no_longer_than_its_window() -> None:
    """The same with replicated weights. An all-reduce takes twice as long as a reduce-scatter, but its window stays the same."""
    graph = trace(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))), (torch.randn(8, 16),))
    returned = {o.name for o in graph.module.graph.output_node().all_input_nodes[1:]}
    pins = {n.name: "P" if n.name in returned else "S(0)" for n in graph.nodes if "einsum" in n.name}
    pins |= {e.node: "R" for e in graph.inputs_of("parameter")}
    plan = plan_graph(graph, Mesh({"a": 2}, ROUND), Request(pins=pins, input_layouts="S(0)", output_layouts="S(0)"))
    assert hidden(plan) == [("all_reduce", pytest.approx(0.5 * product(8) * part)) for part in (0, 1 / 2, 5 / 2)]


def test_hidden_time_of_random_plans() -> None:
    """Legal plans of a Llama on two axes, checked redistribution by redistribution. No more time is hidden than compute takes."""
    mesh = Mesh({"a": 2, "b": 2}, replace(FAST, overlap=0.75))
    annotated = annotate(trace(*llama()[:2]), mesh)
    truth = Truth(annotated)
    free = replace(annotated, mesh=Mesh({"a": 2, "b": 2}, FAST))
    for seed in range(2):
        specs = random_graph_plan(annotated, seed).specs
        plan = write_plan(annotated, Decision(specs), time_price(mesh), "microseconds")
        for entry in plan.redistributions:
            assert entry.hidden == pytest.approx(truth.hidden(specs, annotated.graph.by_name[entry.value], entry.target))
        unhidden = write_plan(free, Decision(specs), time_price(free.mesh), "microseconds")
        inside = sum(
            a.compute - b.compute for a, b in zip(unhidden.nodes, plan.nodes, strict=True)
        )  # that of rings, in attention's own time
        assert plan.objective == pytest.approx(unhidden.objective - sum(plan.hidden.values()) - inside)
        assert 0 < sum(plan.hidden.values()) <= 0.75 * sum(n.compute for n in plan.nodes)


def test_nothing_is_hidden_if_bytes_are_minimised_or_hardware_cannot_overlap() -> None:
    graph = trace(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), (torch.randn(8, 16),))
    pins = {end.node: "S(0)" for end in graph.inputs_of("parameter")}
    for share, objective in ((0.0, "time"), (0.5, "communication")):
        plan = plan_graph(graph, Mesh({"a": 2}, replace(FAST, overlap=share)), Request(pins=pins, objective=objective))
        assert not plan.hidden and '"hidden"' not in plan.to_json() and "assumes" not in str(plan)
