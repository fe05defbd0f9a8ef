"""Shared by the equality tests: runs a model on a mesh with a plan, and compares with one device in float64."""

from __future__ import annotations

from functools import cache
from typing import Any

from zoo import Case, make

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import Reference, assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

SLOW = Hardware("slow", {1: 1e9, 2: 1e9, 4: 1e9, 8: 1e9}, 1e10, 0.0, 64, Link(1e9, 0.0), Link(1e9, 0.0))
"""A slow device with links without latency, so that sharding pays even for small models; on real hardware they stay replicated."""

MESHES = ("a=2", "a=4", "a=8", "a=2,b=2", "a=2,b=4", "a=2,b=2,c=2")


@cache
def prepared(name: str) -> tuple[Case, PlanningGraph, Reference]:
    """The case, its traced graph and its reference on one device."""
    model, args, kwargs = make(name)
    return (model, args, kwargs), trace(model, args, kwargs), one_device(model, args, kwargs)


def mesh_of(text: str) -> Mesh:
    return parse_mesh(text, SLOW)


def check(name: str, plan: fxshard.ShardingPlan) -> None:
    """Lowers ``plan`` and simulates the program. Numbers equal one device, and the collectives are those of the program, one for one."""
    (model, args, kwargs), graph, reference = prepared(name)
    planned = sorted((c.kind, c.axis, c.bytes) for c in plan.collectives)
    assert planned == sorted((c.kind, c.axis, c.bytes) for c in lower(graph, plan).collectives)
    program = lower_plan(graph, plan)
    result = simulate_program(program, program_values(program, model, args, kwargs))
    assert_equal_to_one_device(result, reference)
    assert [(c.kind, c.axis, c.shape, c.dtype) for c in program.collectives] == [
        (c.kind, c.axis, c.shape, c.dtype) for c in result.collectives
    ]
    assert {pair for c in program.collectives for pair in c.serves} <= {(c.entry, c.step) for c in plan.collectives}
    assert sum(c.bytes for c in program.collectives) <= sum(c.bytes for c in plan.collectives)


def check_solver(name: str, mesh_text: str, **options: Any) -> fxshard.ShardingPlan:
    """Checks the solver's plan. It must have collectives, and a plan that is not proven optimal must be marked as cut by a limit."""
    _, graph, _ = prepared(name)
    plan = plan_graph(graph, mesh_of(mesh_text), Request(**options))
    assert plan.collectives
    assert plan.gap == 0 or plan.certificate.cut
    check(name, plan)
    return plan


def check_random(name: str, mesh_text: str, seed: int) -> None:
    _, graph, _ = prepared(name)
    check(name, random_graph_plan(annotate(graph, mesh_of(mesh_text)), seed))
