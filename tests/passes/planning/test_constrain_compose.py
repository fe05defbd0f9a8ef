"""``Equal`` and ``Forbid``, compared with enumeration: the plan meets them, and no plan that meets them costs less."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from passes.constrained import MESH, PAIR, L, getitems, graph, planned
from passes.enumeration import MESHES, SQUARE, Enumeration, graphs
from passes.planning.test_formulate import check_optimal
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard import Equal, Forbid, Pin
from fxshard.errors import ConstraintError
from fxshard.graph.planning_graph import PlanningGraph, operands
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan


def layouts(plan: ShardingPlan) -> dict[str, Layout]:
    """Layouts of nodes and of results by name."""
    found = {n.name: n.spec.outputs[0] for n in plan.nodes if n.spec.outputs}
    return found | {f"outputs[{k}]": layout for k, layout in enumerate(plan.specs["output"].inputs)}


def dims_of(graph: PlanningGraph) -> dict[str, int]:
    returned = zip(graph.outputs, operands(graph.module.graph.output_node()), strict=True)
    found = {n.name: n.meta["val"].dim() for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    return found | {end.name: node.meta["val"].dim() for end, node in returned}


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs(3), st.sampled_from(MESHES), st.sampled_from(["time", "communication"]), st.data())
def test_constrained_plans_on_one_axis_are_optimal(graph: PlanningGraph, mesh: Mesh, objective: str, data: st.DataObject) -> None:
    """If there is no plan, the enumeration finds none either."""
    annotated = annotate(graph, mesh)
    dims = dims_of(graph)
    names = [*sorted(annotated.specs), *(o.name for o in graph.outputs)]
    alike = st.sampled_from(names).flatmap(lambda first: st.sampled_from([n for n in names if dims[n] == dims[first]]))
    groups = data.draw(st.lists(st.lists(alike, min_size=2, max_size=3, unique=True), max_size=2))
    groups = [group for group in groups if len({dims[name] for name in group}) == 1]
    taboo = data.draw(st.lists(st.tuples(st.sampled_from(sorted(annotated.specs)), st.sampled_from(["R", "S(0)", "P"])), max_size=2))
    constraints = [*(Equal(*group) for group in groups), *(Forbid(name, layout) for name, layout in taboo)]
    request = Request(input_layouts="R", objective=objective, constraints=constraints)
    inputs = {end.node for end in graph.inputs_of("input")}

    def keep(name: str, spec: OpSpec) -> bool:
        return (name not in inputs or spec.outputs[0] == L("R")) and (name, str(spec.outputs[0])) not in taboo

    allowed = Enumeration(annotated, objective, keep, alike=groups)
    try:
        plan = plan_graph(graph, mesh, request)
    except ConstraintError as error:
        assert "cannot hold" in error.what
        assert allowed.least(float("inf")) == float("inf")
        return
    found = layouts(plan)
    assert all(len({found[name] for name in group}) == 1 for group in groups)
    check_optimal(plan, allowed)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs(2), st.sampled_from(["a", "b"]), st.sampled_from(["R", "S(0)", "S(1)"]))
def test_constrained_plans_on_two_axes_are_optimal(graph: PlanningGraph, axis: str, placement: str) -> None:
    """A placement on one axis is forbidden for all inputs, and all inputs have the layout of the first output."""
    assume(all(dims_of(graph)[end.name] == 2 for end in graph.outputs))
    annotated = annotate(graph, SQUARE)
    inputs = [end.node for end in graph.inputs_of("input")]
    constraints = [Forbid("args*", placement, axis=axis), Equal("outputs[0]", *inputs)]
    plan = plan_graph(graph, SQUARE, Request(output_layouts="S(0)S(1)" if placement == "R" else None, constraints=constraints))
    bad = L(placement)[0]
    allowed = Enumeration(
        annotated,
        "time",
        lambda name, spec: name not in inputs or spec.outputs[0][SQUARE.axis(axis)] != bad,
        lambda k, layout: placement != "R" or layout == L("S(0)S(1)"),
        alike=[["outputs[0]", *inputs]],
    )
    check_optimal(plan, allowed)


SPLIT = str(graph().by_name[getitems()[0]].args[0])


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (["up.weight", "down.weight"], ["up_weight", "down_weight"]),
        (["*.weight"], ["embed_weight", "up_weight", "down_weight"]),
        (["args[1]", "outputs[1]"], ["args_1", "outputs[1]"]),
        (["up", "down"], [graph().returned["up"][0][0], graph().returned["down"][0][0]]),
        ([f"{SPLIT}[1]", "silu"], [f"{SPLIT}[1]", "silu"]),
        ([getitems()[1], "silu*"], [f"{SPLIT}[1]", "silu"]),
    ],
)
def test_equal_by_every_kind_of_name(names: list[str], meant: list[str]) -> None:
    """A pin on one of them applies to the others."""
    plan = planned(constraints=[Equal(*names), Pin(meant[0].replace("_weight", ".weight").replace("args_1", "args[1]"), "S(1)*")])
    found = layouts(plan) | {f"{SPLIT}[1]": plan.specs[SPLIT].outputs[1]}
    (layout,) = {found[name] for name in meant}
    assert layout[0] == Shard(1)


@pytest.mark.parametrize(
    ("forbid", "taboo"),
    [
        (Forbid("up.weight", "RS(0)"), lambda x: x == L("RS(0)")),
        (Forbid("up.weight", {"tp": Replicate()}), lambda x: x[1] == Replicate()),
        (Forbid("up.weight", "*R"), lambda x: x[1] == Replicate()),
        (Forbid("up.weight", Shard(0), axis="tp"), lambda x: x[1] == Shard(0)),
        (Forbid("up.weight", "S(-2)", axis="tp"), lambda x: x[1] == Shard(0)),
        (Forbid("up", Partial(), axis="dp"), lambda x: x[0] == Partial()),
    ],
    ids=lambda value: str(value) if isinstance(value, Forbid) else "",
)
def test_a_forbidden_layout_is_not_chosen(forbid: Forbid, taboo: Any) -> None:
    """If all other layouts are forbidden too, there is no plan."""
    name = forbid.name if forbid.name != "up" else str(graph().returned["up"][0][0])
    assert not taboo(planned(constraints=[forbid]).layout_of(name))
    every = [s.outputs[0] for s in annotate(graph(), MESH).specs[graph().inputs[1].node]]
    if forbid.name != "up":
        others = [Forbid("up.weight", str(layout)) for layout in dict.fromkeys(every) if not taboo(layout)]
        with pytest.raises(ConstraintError, match="cannot hold together"):
            planned(constraints=[forbid, *others])


def test_a_glob_skips_values_that_cannot_have_the_layout() -> None:
    """A bias has no second dim to shard."""
    plan = planned(PAIR, constraints=[Forbid("*", "S(1)"), Forbid("*.weight", "R"), Forbid("*.bias", "S(0)")])
    shapes = {i.name: len(graph().by_name[i.node].meta["val"].shape) for i in graph().inputs_of("parameter")}
    for name, layout in plan.parameter_layouts().items():
        assert layout in ([L("S(0)"), L("S(0:16+16)")] if shapes[name] == 2 else [L("R")])


def test_layers_with_equal_layouts() -> None:
    """``Equal`` of many values, by a glob, costs as much as the best pin for all of them."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    traced = trace(model, (torch.ones(64, 8),))
    mesh = Mesh({"a": 2, "b": 2}, "cpu")
    alike = plan_graph(traced, mesh, Request(constraints=[Equal("*.weight"), Forbid("0.weight", "R", axis="a")]))
    (layout,) = set(alike.parameter_layouts().values())
    costs = {}
    for s in annotate(traced, mesh).specs[traced.inputs[0].node]:
        if s.outputs[0][0] != Replicate():
            costs[s.outputs[0]] = plan_graph(traced, mesh, Request(pins={"*.weight": s.outputs[0]})).objective
    assert alike.objective == pytest.approx(min(costs.values())) == pytest.approx(costs[layout])
