"""Plans of small graphs, compared with enumeration: no choice costs less, and a shared redistribution is charged once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from passes.enumeration import MESHES, SQUARE, TOY, Const, Enumeration, aten, build, graphs, ops
from passes.memory_truth import peak_memory, peak_memory_bound
from zoo import llama

from fxshard.errors import ConstraintError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan

L = Layout.parse


def brute(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def check_optimal(plan: ShardingPlan, enumeration: Enumeration) -> None:
    """The objective equals the cost that the enumeration counts for the plan, and no choice costs less."""
    slack = 1e-5 + 1e-9 * plan.objective
    assert enumeration.cost_of(plan) == pytest.approx(plan.objective, abs=slack)
    assert 0 <= plan.gap <= 1e-8 and not plan.certificate.cut
    assert enumeration.least(plan.objective - slack) == plan.objective - slack


@brute(150)
@given(graphs(), st.sampled_from(MESHES), st.sampled_from(["time", "communication"]))
def test_plans_on_one_axis_are_optimal(graph: PlanningGraph, mesh: Mesh, objective: str) -> None:
    """Inputs and outputs are replicated, so that sharding must be worth its redistributions."""
    plan = plan_graph(graph, mesh, Request(input_layouts="R", output_layouts="R", objective=objective))
    whole = Enumeration(annotate(graph, mesh), objective, _pinned(_inputs(graph, "R")), lambda k, x: x == L("R"))
    check_optimal(plan, whole)


def _inputs(graph: PlanningGraph, layout: str) -> dict[str, str]:
    return {end.node: layout for end in graph.inputs_of("input")}


def _pinned(pins: dict[str, str]) -> Callable[[str, OpSpec], bool]:
    return lambda name, spec: name not in pins or spec.outputs[0] == L(pins[name])


@brute(100)
@given(graphs(4), st.sampled_from(MESHES), st.sampled_from(["time", "communication"]), st.data())
def test_plans_with_pins_are_optimal(graph: PlanningGraph, mesh: Mesh, objective: str, data: st.DataObject) -> None:
    """Up to three nodes are pinned, each to a legal layout; the last output is sharded."""
    annotated = annotate(graph, mesh)
    pins = {}
    for name in data.draw(st.lists(st.sampled_from(sorted(annotated.specs)), max_size=3, unique=True)):
        pins[name] = str(data.draw(st.sampled_from([s.outputs[0] for s in annotated.specs[name]])))
    results = [None] * len(graph.outputs)
    results[-1] = "S(0)"
    plan = plan_graph(graph, mesh, Request(pins=pins, output_layouts=results, objective=objective))
    assert all(plan.layout_of(name) == L(layout) for name, layout in pins.items())
    check_optimal(plan, Enumeration(annotated, objective, _pinned(pins), lambda k, x: k + 1 < len(results) or x == L("S(0)")))


@brute(60)
@given(graphs(2), st.sampled_from(["time", "communication"]), st.sampled_from(["RR", "S(0)R", "RS(1)", "S(0)S(1)"]))
def test_plans_on_two_axes_are_optimal(graph: PlanningGraph, objective: str, layout: str) -> None:
    plan = plan_graph(graph, SQUARE, Request(input_layouts=layout, output_layouts="RR", objective=objective))
    check_optimal(plan, Enumeration(annotate(graph, SQUARE), objective, _pinned(_inputs(graph, layout)), lambda k, x: x == L("RR")))


def check_within_a_limit(graph: PlanningGraph, mesh: Mesh, share: float) -> None:
    """Plans under a limit of ``share`` of the memory that the plan without a limit needs.

    Bounds and refusals agree with the enumeration. The plan keeps the limit, and costs no more than the cheapest choice that keeps it by
    the upper bound of memory.
    """
    truth = Enumeration(annotate(graph, mesh), "time", _pinned(_inputs(graph, "R")), lambda k, x: x == L("R"))
    request = Request(input_layouts="R", output_layouts="R")
    free = plan_graph(graph, mesh, request)
    held = peak_memory(graph, free.specs, free.specs["output"].inputs, mesh, truth.price)
    assert sum(free.memory.values()) == held
    truth.memory_limit = limit = int(share * held)
    least = truth.least(float("inf"))
    surely = replace(truth, count=peak_memory_bound).least(float("inf"))
    try:
        plan = plan_graph(graph, mesh, replace(request, memory_limit=limit))
    except ConstraintError as error:
        assert surely == float("inf") and ("nothing fits" not in error.what or least == float("inf"))
        return
    assert sum(plan.memory.values()) == peak_memory(graph, plan.specs, plan.specs["output"].inputs, mesh, truth.price) <= limit
    slack = 1e-5 + 1e-9 * plan.objective
    assert truth.cost_of(plan) == pytest.approx(plan.objective, abs=slack)
    assert plan.lower_bound - slack <= least <= plan.objective + slack and plan.objective <= surely + slack


@pytest.mark.parametrize("examples", [6, pytest.param(25, marks=pytest.mark.slow)])
def test_plans_within_a_memory_limit(examples: int) -> None:
    cases = given(graphs(3, parameters=2), st.sampled_from(MESHES[:4]), st.floats(0.5, 1.0))
    brute(examples)(cases(check_within_a_limit))()


@st.composite
def popular(draw: st.DrawFn) -> tuple[PlanningGraph, int]:
    """(graph, number of readers): a product read by 2, 3 or 6 operators of several kinds, some of which read it twice; all are returned."""
    size, count = draw(st.sampled_from([4, 8, 16])), draw(st.sampled_from([2, 3, 6]))
    calls: list[tuple] = [(ops.einsum.default, 0, 1, Const("mk,kn->mn"))]
    for _ in range(count):
        equation = Const(draw(st.sampled_from(["mk,kn->mn", "km,kn->mn", "mk,nk->mn"])))
        other = draw(st.sampled_from([0, 0, 0, 2]))
        calls.append(draw(st.sampled_from([(ops.einsum.default, 2, other, equation), (aten.add.Tensor, 2, other), (aten.relu.default, 2)])))
    return build([(size, size)] * 2, calls, list(range(3, 3 + count))), count


@brute(80)
@given(popular(), st.sampled_from(MESHES[:3]), st.sampled_from(["time", "communication"]), st.sampled_from(["S(0)", "S(1)", "P"]))
def test_a_value_with_many_readers(case: tuple[PlanningGraph, int], mesh: Mesh, objective: str, layout: str) -> None:
    """Readers share redistributions. Some read the value twice."""
    graph, _ = case
    pins = {"einsum_default": layout}
    plan = plan_graph(graph, mesh, Request(pins=pins, input_layouts="R", objective=objective))
    check_optimal(plan, Enumeration(annotate(graph, mesh), objective, _pinned(pins | _inputs(graph, "R"))))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_shared_redistribution_is_charged_once(count: int) -> None:
    """Every reader is pinned to R: there is one all-gather of 8 x 8 floats over 4 ranks, however many read it."""
    graph = build([(8, 8)], [(aten.relu.default, 0)] + [(aten.relu.default, 1)] * count, list(range(2, 2 + count)))
    pins = {"relu_default": "S(0)"} | {f"relu_default_{i}": "R" for i in range(1, count + 1)}
    plan = plan_graph(graph, Mesh({"a": 4}, TOY), Request(pins=pins, input_layouts="R", output_layouts="R", objective="communication"))
    (move,) = plan.redistributions[1:]
    assert [s.kind for s in move.steps] == ["all_gather"] and len(move.readers) == count
    assert plan.objective == pytest.approx(3 / 4 * 8 * 8 * 4)


def test_two_layouts_of_one_value_are_charged_each() -> None:
    graph = build([(8, 8)], [(aten.relu.default, 0)] * 3, [1, 2, 3])
    pins = {"relu_default": "R", "relu_default_1": "S(1)", "relu_default_2": "S(1)"}
    request = Request(pins=pins, input_layouts="S(0)", output_layouts=["R", "S(1)", "S(1)"], objective="communication")
    plan = plan_graph(graph, Mesh({"a": 4}, TOY), request)
    assert [[s.kind for s in m.steps] for m in plan.redistributions] == [["all_gather"], ["all_to_all"]]
    assert plan.objective == pytest.approx(3 / 4 * 256 + 3 / 4 * 256 / 4)


@cache
def training() -> PlanningGraph:
    return trace(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.ReLU()), (torch.randn(16, 8),))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m}-{m.hardware.name}")
@pytest.mark.parametrize("objective", ["time", "communication"])
@pytest.mark.parametrize("inputs", [None, "R", "S(0)"])
@pytest.mark.parametrize("limit", [None, 2000])
def test_training_plans_are_optimal(mesh: Mesh, objective: str, inputs: str | None, limit: int | None) -> None:
    """A gradient has the layout of its parameter, a tangent that of its output."""
    graph = training()
    plan = plan_graph(graph, mesh, Request(input_layouts=inputs, objective=objective, memory_limit=limit))
    pins = _inputs(graph, inputs) if inputs else {}
    check_optimal(plan, Enumeration(annotate(graph, mesh), objective, _pinned(pins), memory_limit=limit))
    assert limit is None or sum(plan.memory.values()) <= limit


def test_the_gap_of_a_search_that_was_cut_short() -> None:
    graph = trace(*llama()[:2])
    cut, proven = (plan_graph(graph, SQUARE, Request(time_limit=limit)) for limit in (1e-6, None))
    assert cut.certificate.cut and not proven.certificate.cut
    assert cut.gap > 0 and proven.gap == 0 and proven.certificate.lower_bound == proven.objective
    assert 0 < cut.certificate.lower_bound <= proven.objective <= cut.objective
    assert cut.gap == pytest.approx(1 - cut.certificate.lower_bound / cut.objective)


def test_empty_shards_are_used_only_if_pinned() -> None:
    """The shards of 5 rows on 4 ranks have 2, 2, 1 and 0 rows."""
    graph, mesh = build([(5, 64)], [(aten.relu.default, 0)], [1]), Mesh({"a": 4}, TOY)
    assert plan_graph(graph, mesh, Request()).layout_of("relu_default") == L("S(1)")
    assert plan_graph(graph, mesh, Request(pins={"relu_default": "S(0)"})).layout_of("relu_default") == L("S(0)")
