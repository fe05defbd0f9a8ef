"""Packed projections are cut by heads: programs equal one device, forward and backward, on any plan."""

from functools import lru_cache
from typing import Any

import pytest
from equality import mesh_of
from packed_models import MODELS, made

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

PACKED = {"split": "8,8,8", "slices": "8,8,8", "view": "8,8,8", "by_head": "", "fewer pairs": "8,4,4", "gate and up": "10,10"}
"""The parts of each model's packed weight; "" if an ordinary shard has whole heads."""


@lru_cache(maxsize=2)
def prepared(name: str) -> tuple[Any, PlanningGraph, Any]:
    model, x = made(name)
    return (model, (x,), {}), trace(model, (x,)), one_device(model, (x,), {})


def check(name: str, plan: fxshard.ShardingPlan) -> None:
    case, graph, reference = prepared(name)
    assert fxshard.ShardingPlan.from_json(plan.to_json()) == plan
    program = lower_plan(graph, plan)
    assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_weight_has_megatrons_collectives(name: str) -> None:
    """The rows of the output projection are cut, the residual stream is whole: one all-reduce after the projection, one in the backward."""
    _, graph, _ = prepared(name)
    parts = f"S(0:{PACKED[name]})" if PACKED[name] else "S(0)"
    last = "down" if "gate" in name else "out"
    pins = {"packed.weight": parts, f"{last}.weight": "S(1)", **({"packed.bias": parts, "out.bias": "R"} if last == "out" else {})}
    plan = plan_graph(graph, fxshard.Mesh({"tp": 2}, "h100"), Request(pins=pins, input_layouts="R", output_layouts="R"))
    assert [(c.kind, c.buffer) for c in plan.collectives] == [("all_reduce", tuple(prepared(name)[0][1][0].shape))] * 2
    check(name, plan)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_the_solvers_plan_equals_one_device(name: str, mesh: str) -> None:
    check(name, plan_graph(prepared(name)[1], mesh_of(mesh), Request()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_equal_one_device(name: str, mesh: str, seed: int) -> None:
    check(name, random_graph_plan(annotate(prepared(name)[1], mesh_of(mesh)), seed))
