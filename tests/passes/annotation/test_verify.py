"""A plan that was tampered with is refused, by verify and by lower, naming the node or edge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fxshard.errors import PlanError
from fxshard.layout.layouts import FoldedShard, Layout
from fxshard.layout.redistribution import Step, bytes_price
from fxshard.mesh.mesh import Mesh
from fxshard.passes import pipeline
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.passes.annotation.verify import verify_plan
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.planning.choose import Decision, write_plan
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan

L = Layout.parse
MESH = Mesh({"a": 2, "b": 2})
PINS = {"0.weight": "RS(0)", "2.weight": "RS(1)", "args[0]": "S(0)R"}


@lru_cache
def planned() -> tuple[Annotated, ShardingPlan]:
    graph = trace(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.ones(8, 8),))
    return annotate(graph, MESH), plan_graph(graph, MESH, Request(pins=PINS, output_layouts="RR", objective="communication"))


def with_spec(name: str, spec: OpSpec) -> Callable[[ShardingPlan], ShardingPlan]:
    def change(plan: ShardingPlan) -> ShardingPlan:
        return dataclasses.replace(plan, nodes=tuple(dataclasses.replace(n, spec=spec) if n.name == name else n for n in plan.nodes))

    return change


def with_facts(name: str, **fields: Any) -> Callable[[ShardingPlan], ShardingPlan]:
    def change(plan: ShardingPlan) -> ShardingPlan:
        nodes = tuple(dataclasses.replace(n, **fields) if n.name == name else n for n in plan.nodes)
        return dataclasses.replace(plan, nodes=nodes)

    return change


def with_move(**fields: Any) -> Callable[[ShardingPlan], ShardingPlan]:
    """Other fields for the first redistribution."""

    def change(plan: ShardingPlan) -> ShardingPlan:
        first, *others = plan.redistributions
        return dataclasses.replace(plan, redistributions=(dataclasses.replace(first, **fields), *others))

    return change


def without_a_node(plan: ShardingPlan) -> ShardingPlan:
    return dataclasses.replace(plan, nodes=plan.nodes[1:])


def without_a_move(plan: ShardingPlan) -> ShardingPlan:
    return dataclasses.replace(plan, redistributions=plan.redistributions[1:])


def with_an_idle_move(plan: ShardingPlan) -> ShardingPlan:
    extra = dataclasses.replace(plan.redistributions[0], target=L("S(1)S(1)"))
    return dataclasses.replace(plan, redistributions=(*plan.redistributions, extra))


def rewritten(name: str, index: int | None, layouts: str) -> Callable[[ShardingPlan], ShardingPlan]:
    """Another spec for a node, or another layout for one operand, with redistributions that match, so that every edge is consistent."""

    def change(plan: ShardingPlan) -> ShardingPlan:
        reads = plan.specs[name].inputs
        spec = OpSpec(reads, (L(layouts),)) if index is None else OpSpec((*reads[:index], L(layouts), *reads[index + 1 :]), ())
        return write_plan(planned()[0], Decision({**plan.specs, name: spec}), bytes_price, "bytes")

    return change


def gradient(name: str) -> int:
    return next(k for k, o in enumerate(planned()[1].outputs) if (o.kind, o.name) == ("gradient", name))


def other_steps(plan: ShardingPlan) -> tuple[Step, ...]:
    first = plan.redistributions[0].steps[0]
    return (dataclasses.replace(first, axis=1 - first.axis),)


def test_the_solvers_plan_is_legal() -> None:
    annotated, plan = planned()
    verify_plan(annotated, plan)
    assert plan.redistributions[0].steps


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (without_a_node, "leaves out|no OpSpec for"),
        (without_a_move, "nothing brings"),
        (with_an_idle_move, "which nobody reads"),
        (lambda p: dataclasses.replace(p, redistributions=(p.redistributions[0], *p.redistributions)), "twice"),
        (lambda p: with_move(readers=())(p), "nothing brings"),
        (lambda p: dataclasses.replace(p, nodes=(*p.nodes, dataclasses.replace(p.nodes[0], name="ghost"))), "names ghost, which the graph"),
        (rewritten("output", 0, "RP"), r"output outputs\[0\] is left pending \(RP\)"),
        (rewritten("output", 0, "S(1)S(1)"), r"output outputs\[0\] has layout S\(1\)S\(1\), its tangent RR"),
        (lambda p: rewritten("output", gradient("0.weight"), "RR")(p), r"gradient 0.weight has layout RR, its input RS\(0\)"),
        (lambda p: rewritten("output", gradient("2.bias"), "PR")(p), "gradient 2.bias is left pending"),
        (lambda p: with_move(steps=())(p), "ends at"),
        (lambda p: with_move(steps=other_steps(p))(p), "takes a step"),
        (lambda p: with_move(steps=(dataclasses.replace(p.redistributions[0].steps[0], kind="slice"),))(p), "takes a step"),
        (lambda p: with_move(source=L("S(1)S(1)"))(p), "nothing brings"),
        (lambda p: with_move(shape=(4, 4))(p), "for another tensor"),
        (with_facts("relu", op="aten.neg.default"), "relu the operator 'aten.neg.default', the model 'aten.relu.default'"),
        (with_facts("relu", op=""), "relu the operator '', the model 'aten.relu"),
        (with_facts("relu", shapes=((8, 17),)), r"relu the shapes \(\(8, 17\),\), the model \(\(8, 16\),\)"),
        (with_facts("args_0", op="get_attr"), "args_0 the operator 'get_attr', the model 'placeholder'"),
        (with_facts("args_0", dtypes=("float16",)), r"args_0 the dtypes \('float16',\), the model \('float32',\)"),
        (with_spec("relu", OpSpec((L("RR"),), ())), "not for 1 operands and 1 outputs"),
        (with_spec("relu", OpSpec((L("R"),), (L("R"),))), "not for 2 dims and mesh a=2,b=2"),
        (with_spec("relu", OpSpec((L("RS(2)"),), (L("RS(2)"),))), "not for 2 dims"),
    ],
)
def test_a_corrupted_plan_is_refused(corrupt: Callable[[ShardingPlan], ShardingPlan], said: str) -> None:
    annotated, plan = planned()
    for check in (verify_plan, lambda a, p: lower(a.graph, p)):
        with pytest.raises(PlanError, match=said) as error:
            check(annotated, corrupt(plan))
        assert error.value.where and error.value.remedy


def test_a_partial_plan_of_all_nodes_may_leave_out_operators_shapes_and_dtypes() -> None:
    annotated, plan = planned()
    bare = dataclasses.replace(plan, partial=True, nodes=tuple(dataclasses.replace(n, op="", shapes=(), dtypes=()) for n in plan.nodes))
    verify_plan(annotated, bare)
    with pytest.raises(PlanError, match="relu the operator"):
        verify_plan(annotated, with_facts("relu", op="aten.neg.default")(bare))


@pytest.mark.parametrize(("name", "layout"), [("relu", "RP"), ("relu", "S(1)S(1)"), ("args_0", "PR")])
def test_specs_that_no_rule_offers_are_refused(name: str, layout: str) -> None:
    """All edges are consistent. Only the rules show the fault, and they are consulted before anything is lowered."""
    annotated, plan = planned()
    for check in (verify_plan, lambda a, p: lower_plan(a.graph, p)):
        with pytest.raises(PlanError, match=rf"{name} \(.*\) cannot run as") as error:
            check(annotated, rewritten(name, None, layout)(plan))
        assert error.value.where and error.value.remedy


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (Step("all_gather", 0, Shard(0), L("R")[0]), r"ends at RS\(0 in 0,1\), not at RS\(0\)"),
        (Step("all_gather", 1, FoldedShard(0, (0, 1)), L("R")[0]), r"takes a step .* from S\(0\)S\(0\)"),
    ],
)
def test_one_gather_cannot_remove_the_outer_axis(step: Step, what: str) -> None:
    """One all-gather from S(0)S(0) to RS(0) would order the pieces wrongly: on axis 0 it ends folded, on axis 1 it must start folded."""
    annotated, plan = planned()
    first = dataclasses.replace(plan.redistributions[0], source=L("S(0)S(0)"), target=L("RS(0)"), steps=(step,))
    relu = OpSpec((L("RS(0)"),), (L("RS(0)"),))
    value = annotated.graph.by_name["relu"].args[0].name
    nodes = tuple(
        dataclasses.replace(n, spec=relu if n.name == "relu" else dataclasses.replace(n.spec, outputs=(L("S(0)S(0)"),)))
        if n.name in ("relu", value)
        else n
        for n in plan.nodes
    )
    shape = tuple(annotated.graph.by_name[value].meta["val"].shape)
    moved = dataclasses.replace(first, value=value, shape=shape, readers=(("relu", 0),))
    with pytest.raises(PlanError, match=what):
        verify_plan(annotated, dataclasses.replace(plan, nodes=nodes, redistributions=(moved, *plan.redistributions)))


def test_a_plan_of_the_planner_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that the planner made for the graph is lowered without consulting the rules, any other plan with them."""
    annotated, plan = planned()
    asked = []
    monkeypatch.setattr(pipeline.annotate, "annotate", lambda *given: asked.append(given) or annotated)
    first = lower_plan(annotated.graph, plan, legal=True)
    assert not asked
    assert lower_plan(annotated.graph, plan).hash == first.hash and len(asked) == 1
