"""Axes of one rank: a plan with them is the plan without them, and a layout there says nothing."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import fxshard
from fxshard.errors import ConstraintError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout, canonical
from fxshard.layout.redistribution import single_step, steps
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.constraints import Forbid, Pin
from fxshard.plans.parallel import read_parallel
from fxshard.plans.plan_data import Certificate, OpSpec, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device

WORDS = {"dp_replicate": "ddp", "dp_shard": "fsdp", "cp": "cp", "tp": "tp", "ep": "ep"}
"""torchtitan's names of axes, and what each is for."""


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.up(x).relu())


@lru_cache(maxsize=1)
def traced() -> tuple[Any, PlanningGraph, Any]:
    torch.manual_seed(0)
    model, x = Perceptron().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    return (model, (x,), {}), trace(model, (x,)), one_device(model, (x,), {})


def planned(axes: dict[str, int], **request: Any) -> ShardingPlan:
    mesh = Mesh(axes)
    words = read_parallel({axis: WORDS[axis] for axis in axes}, mesh)
    return plan_graph(traced()[1], mesh, Request(parallel=words, **request))


@pytest.mark.parametrize("several", [("dp_shard",), ("tp",), ("dp_replicate", "dp_shard"), ("dp_shard", "tp"), ("cp", "ep"), ()])
def test_torchtitans_five_names(several: tuple[str, ...]) -> None:
    """Layouts on the axes of two ranks, and the cost, are those of the mesh without the others; the numbers are those of one device."""
    case, graph, reference = traced()
    plan = planned({axis: 2 if axis in several else 1 for axis in WORDS})
    alone = planned(dict.fromkeys(several, 2) or {"dp_shard": 1})
    assert (plan.objective, plan.lower_bound) == (alone.objective, alone.lower_bound)
    kept = [k for k, axis in enumerate(WORDS) if axis in several]
    for name, spec in plan.specs.items():
        if several:
            assert [Layout(layout[k] for k in kept) for layout in spec.outputs] == list(alone.specs[name].outputs)
    program = lower_plan(graph, plan)
    assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)


@pytest.mark.slow
def test_four_axes_of_two_ranks() -> None:
    case, graph, reference = traced()
    plan = planned(dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp"), 2))
    program = lower_plan(graph, plan)
    assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)


def test_as_many_specs_as_without_them() -> None:
    graph = traced()[1]
    few, many = (annotate(graph, Mesh(axes)).specs for axes in ({"a": 2, "b": 3}, {"x": 1, "a": 2, "y": 1, "b": 3, "z": 1}))
    assert {name: len(specs) for name, specs in few.items()} == {name: len(specs) for name, specs in many.items()}


@pytest.mark.parametrize(
    "request_",
    [
        {"pins": {"up.weight": "S(1)S(0)"}},
        {"pins": {"up.weight": {"idle": Shard(0), "tp": Shard(0)}}},
        {"constraints": [Pin("up.weight", [Shard(1), Shard(0)]), Forbid("experts.weight", Replicate(), axis="idle")]},
        {"constraints": [Forbid("up.weight", "RR"), Forbid("up.weight", "S(0)S(1)")]},
    ],
    ids=["text", "by axis", "constraints", "forbidden"],
)
def test_a_layout_on_them_says_nothing(request_: dict[str, Any]) -> None:
    plan = plan_graph(traced()[1], Mesh({"idle": 1, "tp": 2}), Request(**request_))
    assert str(plan.specs["up_weight"].outputs[0]) == "RS(0)"


def test_forbidding_every_layout_is_still_an_error() -> None:
    with pytest.raises(ConstraintError, match="cannot hold"):
        plan_graph(traced()[1], Mesh({"idle": 1, "tp": 2}), Request(constraints=[Forbid("up.weight", "**")]))


def plan_and_file(idle: int) -> tuple[ShardingPlan, str]:
    """A plan, and as text the same with layouts on the axis ``idle`` of one rank, as a file may be that is older or written by hand."""
    axes = {axis: 1 if k == idle else 2 for k, axis in enumerate(("a", "b"))}
    plan = plan_graph(traced()[1], Mesh(axes), Request(pins={"up.weight": {"ab"[1 - idle]: Shard(0)}}))

    def there(layout: Layout) -> Layout:
        return layout.with_axis(idle, Shard(0)) if layout[idle] == Replicate() else layout

    specs = {name: OpSpec(*(tuple(map(there, side)) for side in (spec.inputs, spec.outputs))) for name, spec in plan.specs.items()}
    nodes = tuple(dataclasses.replace(node, spec=specs[node.name]) for node in plan.nodes)
    gather = single_step(idle, Shard(0), Replicate())
    assert gather is not None
    moves = (dataclasses.replace(m, source=there(m.source), target=m.target, steps=(gather, *m.steps)) for m in plan.redistributions)
    return plan, dataclasses.replace(plan, nodes=nodes, redistributions=tuple(moves)).to_json()


@pytest.mark.parametrize("idle", [0, 1])
def test_a_file_that_shards_there_is_the_plan_without(idle: int) -> None:
    """Layouts and steps there are left out, whether they stand before or behind the others; so it runs, and differs in nothing."""
    case, graph, reference = traced()
    plan, text = plan_and_file(idle)
    other = ShardingPlan.from_json(text)
    assert plan.redistributions and text != plan.to_json() and other == plan
    assert fxshard.diff(other, plan).equal
    program = lower_plan(graph, other)
    assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)
    again = plan_graph(graph, plan.mesh, Request(pins=other))
    assert {n: s for n, s in again.specs.items()} == {n: s for n, s in plan.specs.items()}


def test_an_explanation_shows_the_layout_that_was_asked_for() -> None:
    plan = fxshard.plan(Perceptron(), (torch.randn(4, 6, 8),), Mesh({"idle": 1, "tp": 2}), cache=False)
    for layout in ("S(1)S(0)", "RS(1)", "S(0)*"):
        assert [choice.layout for choice in plan.explain("up.weight", layout).choices] == [layout]


def test_no_steps_lead_there() -> None:
    mesh = Mesh({"idle": 1, "tp": 2})
    between = lambda source, target: steps(Layout.parse(source), Layout.parse(target), (4, 4), 8, mesh)  # noqa: E731
    assert between("S(0)P", "PR") == between("RP", "RR")
    assert between("S(0)R", "S(1)R") == ()
    assert canonical(Layout.parse("S(0)P"), mesh.shape) == Layout.parse("RP")


@pytest.mark.parametrize(("source", "target"), [("RRS(0)", "RS(0)R"), ("S(0)S(0)S(0)", "RRR"), ("RS(0)P", "RRR")])
@pytest.mark.parametrize("idle", [0, 2])
def test_steps_beside_them_are_read_again(source: str, target: str, idle: int) -> None:
    """hypothesis found the first two: the layouts of the axis of one rank stood in the way of the others."""
    mesh = Mesh({axis: 1 if k == idle else 2 for k, axis in enumerate(("a", "b", "c"))})
    ends = Layout.parse(source), Layout.parse(target)
    moves = (Redistribution("x", (5, 4), 1, *ends, steps(*ends, (5, 4), 1, mesh), ()),)
    plan = ShardingPlan(mesh, False, "ab" * 32, (), moves, Certificate("microseconds", 0.0, 0.0))
    (move,) = ShardingPlan.from_json(plan.to_json()).redistributions
    assert move.steps == moves[0].steps and move.source == canonical(ends[0], mesh.shape)


def test_a_word_there_that_matches_nothing_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for ranks in (1, 2):
        words = read_parallel({"tp": {"gate": "colwise"}}, mesh := Mesh({"tp": ranks}))
        plan_graph(traced()[1], mesh, Request(parallel=words))
        assert ("matches no module" in caplog.text) == (ranks > 1)
