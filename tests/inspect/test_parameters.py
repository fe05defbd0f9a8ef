"""Equal parameters of layers share a line of the summary; one that differs has its own."""

from __future__ import annotations

from fxshard import inspect
from fxshard.plans.plan_data import OpSpec, PlanEnd, PlannedNode
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import MESH, L


def _rows(layouts: list[str]) -> list[list[str]]:
    names = [f"layers.{i}.weight" for i in range(len(layouts))]
    specs = [OpSpec((), (L(at),)) for at in layouts]
    nodes = tuple(PlannedNode(n, "placeholder", spec, ((8, 4),), ("float32",)) for n, spec in zip(names, specs, strict=True))
    plan = ShardingPlan(MESH, True, "", nodes, inputs=tuple(PlanEnd("parameter", n, n) for n in names))
    lines = inspect.summary(plan).splitlines()
    return [line.split() for line in lines if line.startswith("layers")]


def test_equal_parameters_share_a_line() -> None:
    assert _rows(["RS(0)", "RS(0)", "RS(0)"]) == [["layers.0-2", "3", "S(0)", "on", "tp", "384", "bytes"]]


def test_a_parameter_that_differs_has_its_own_line() -> None:
    rows = _rows(["RS(0)", "RS(0)", "RR", "RS(0)"])
    assert [row[:3] for row in rows] == [["layers.0-1,3", "3", "S(0)"], ["layers.2", "1", "whole"]]
