"""Limits on the bytes sent on an axis, compared with enumeration and with the plan's collectives."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from passes.constrained import MESH, PAIR
from passes.enumeration import MESHES, SQUARE, Enumeration, graphs
from passes.planning.test_formulate import check_optimal
from torch import nn
from torch.nn import functional as F

from fxshard import Communication, Equal, Forbid
from fxshard.errors import ConstraintError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning.constrain import constraints_of
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan


def sent(plan: ShardingPlan, axis: str) -> int:
    return sum(c.bytes for c in plan.collectives if c.axis == axis)


def least_named(error: ConstraintError) -> int:
    (number,) = re.findall(r"least found is (?:.*\()?([\d,]+) bytes?\)? per rank", str(error.remedy))
    return int(number.replace(",", ""))


@settings(max_examples=24, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graphs(3), st.sampled_from([*MESHES[:3], SQUARE]), st.sampled_from(["time", "communication"]), st.floats(0, 1.2), st.data())
def test_plans_within_a_limit_are_optimal(graph: PlanningGraph, mesh: Mesh, objective: str, share: float, data: st.DataObject) -> None:
    """Inputs are sharded, so that something is sent. If nothing fits, no plan sends less than the least that the error names."""
    annotated, axis = annotate(graph, mesh), data.draw(st.sampled_from(mesh.axis_names))
    layout = "S(0)" + "R" * (mesh.ndim - 1)
    request = {"input_layouts": layout, "output_layouts": "R" * mesh.ndim, "objective": objective}
    free = plan_graph(graph, mesh, Request(**request))
    limit = int(sent(free, axis) * share)
    inputs = {end.node for end in graph.inputs_of("input")}

    def within(most: int) -> Enumeration:
        keep = lambda name, spec: name not in inputs or str(spec.outputs[0]) == layout  # noqa: E731
        return Enumeration(annotated, objective, keep, lambda k, x: x.is_replicated, at_most={axis: most})

    try:
        plan = plan_graph(graph, mesh, Request(**request, constraints=[Communication(axis, at_most=limit)]))
    except ConstraintError as error:
        least = least_named(error)
        assert error.what.startswith("these constraints cannot hold together: ") and least > limit
        assert error.what.endswith(f"; Communication({axis!r}, at_most={limit})")
        assert within(least - 1).least(float("inf")) == float("inf")
        assert sent(plan_graph(graph, mesh, Request(**request, constraints=[Communication(axis, least)])), axis) == least
        return
    assert sent(plan, axis) <= limit
    check_optimal(plan, within(limit))


class Classifier(nn.Module):
    """A norm and a loss. The nodes of each share a solver variable, and values are redistributed between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.down(self.norm(self.up(x))), target)


@lru_cache
def classifier() -> PlanningGraph:
    return trace(Classifier(), (torch.randn(32, 8), torch.zeros(32, dtype=torch.int64)))


@pytest.mark.parametrize("objective", ["time", "communication"])
@pytest.mark.parametrize("pins", [{}, {"args[0]": "S(0)S(1)"}, {"up": "S(1)S(0)", "down": "RS(1)"}], ids=str)
def test_the_solver_counts_the_bytes_of_the_plan(objective: str, pins: dict[str, str]) -> None:
    """The solver's totals for the choices of a plan equal the bytes of the plan's collectives."""
    graph = classifier()
    limits = [Communication(axis, at_most=1e9) for axis in SQUARE.axis_names]
    found = formulate(annotate(graph, SQUARE), constraints_of(graph, SQUARE, pins=pins, constraints=limits), objective)
    assert len(found.node_vars) > len({var for var, _ in found.node_vars.values()})
    plan = plan_graph(graph, SQUARE, Request(pins=pins, objective=objective, constraints=limits))
    choices = [0] * len(found.problem)
    for var, _ in found.node_vars.values():
        members = [(name, options) for name, (other, options) in found.node_vars.items() if other == var]
        choices[var] = next(k for k in range(len(members[0][1])) if all(options[k] == plan.specs[name] for name, options in members))
    for index, (var, layouts) in found.result_vars.items():
        choices[var] = layouts.index(plan.specs["output"].inputs[index])
    assert found.problem.totals(choices) == [sent(plan, axis) for axis in SQUARE.axis_names]
    assert not pins or any(found.problem.totals(choices))


def test_a_limit_beside_other_constraints() -> None:
    """The limit is half of the bytes sent without it. If no plan keeps it, the error names a limit that can be kept."""
    mesh, asked = Mesh({"dp": 2, "tp": 2}), {"input_layouts": ["S(0)S(1)", None], "constraints": [Equal("*.bias"), Forbid("up", "RR")]}
    free = plan_graph(classifier(), mesh, Request(**asked))
    assert sent(free, "tp")
    limit = Communication("tp", at_most=sent(free, "tp") / 2)
    try:
        plan = plan_graph(classifier(), mesh, Request(**{**asked, "constraints": [*asked["constraints"], limit]}))
        assert sent(plan, "tp") <= limit.at_most and plan.objective >= free.objective
    except ConstraintError as error:
        assert least_named(error) > limit.at_most


def test_a_limit_of_zero_bytes() -> None:
    plan = plan_graph(classifier(), MESH, Request(pins={"args[0]": "*S(0)"}, constraints=[Communication("dp", at_most=0)]))
    assert not sent(plan, "dp") and sent(plan, "tp")


def test_limits_that_contradict_each_other() -> None:
    """Each alone can be kept: replicated weights need no communication, sharded ones less memory. No other constraint is named."""
    graph = trace(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), (torch.ones(64, 64),), train=False)
    asked: dict[str, Any] = {"input_layouts": "S(0)", "output_layouts": "S(0)", "memory_limit": 76_000, "train": False}
    limit, beside = Communication("tp", at_most=100), Forbid("args[0]", "S(1)")
    for one in ({"constraints": [beside]}, {"constraints": [limit, beside], "memory_limit": None}):
        plan_graph(graph, PAIR, Request(**{**asked, **one}))
    with pytest.raises(ConstraintError) as caught:
        plan_graph(graph, PAIR, Request(**asked, constraints=[limit, beside]))
    said = set(caught.value.what.partition("cannot hold together: ")[2].split("; "))
    assert {str(limit), "memory_limit=76000"} <= said and str(beside) not in said
