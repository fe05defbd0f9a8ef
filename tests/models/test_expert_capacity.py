"""Experts of a fixed capacity, written in plain torch, equal one device, and tokens travel to sharded experts by all-to-all."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from equality import mesh_of

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.capacity import ByEinsum, ByIndex, ByScatter
from tests.slices import diagonal

FORMS = (ByEinsum, ByScatter, ByIndex)


@lru_cache(maxsize=4)
def prepared(form: type[Any], experts: int = 4, groups: int = 4, tokens: int = 16) -> tuple[Any, PlanningGraph, Any]:
    """Each expert takes half of what it would get if all got the same, so that some tokens are dropped and some are not."""
    model = form(experts, tokens * (groups if form is ByIndex else 1) // experts // 2).double()
    x = torch.randn(groups, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert 0 < (model(x) == 0).all(-1).sum() < groups * tokens
    return (model, (x,), {}), trace(model, (x,)), one_device(model, (x,), {})


def check(plan: fxshard.ShardingPlan, *key: Any) -> None:
    case, graph, reference = prepared(*key)
    program = lower_plan(graph, plan)
    found = simulate_program(program, program_values(program, *case))
    assert_equal_to_one_device(found, reference)
    assert [(c.kind, c.axis, c.shape) for c in found.collectives] == [(c.kind, c.axis, c.shape) for c in program.collectives]


@pytest.mark.parametrize(("form", "mesh"), diagonal(FORMS, ["ep=2", "ep=4", "dp=2,ep=2"]))
def test_plans_equal_one_device(form: type[Any], mesh: str) -> None:
    check(plan_graph(prepared(form)[1], mesh_of(mesh), Request()), form)
    for seed in range(3):
        check(random_graph_plan(annotate(prepared(form)[1], mesh_of(mesh)), seed), form)


@pytest.mark.parametrize(("form", "mesh"), diagonal(FORMS, ["dp=2,ep=2", "ep=2", "ep=4"]))
def test_uneven_experts_groups_and_tokens(form: type[Any], mesh: str) -> None:
    key = (form, 5, 3, 11)
    for seed in range(2):
        check(random_graph_plan(annotate(prepared(*key)[1], mesh_of(mesh)), seed), *key)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_travel_by_all_to_all(form: type[Any]) -> None:
    """Groups and experts are sharded over one axis. What the experts take and give, and its gradients, travel in four all-to-alls of
    (n - 1) / n of a rank's part; in one group each of these has a second one, between tokens and columns, and the numbers of their experts
    are gathered. No tokens are gathered or reduced."""
    key = (form, 4, 4, 64)
    request = Request(pins={"experts.*": "S(0)"}, input_layouts="S(0)", output_layouts="S(0)", objective="communication")
    plan = plan_graph(prepared(*key)[1], mesh_of("ep=4"), request)
    check(plan, *key)
    tokens = 4 * 64 * 8 * 8
    sent = [(c.kind, c.bytes) for c in plan.collectives if c.bytes > 1000]
    expected = [("all_to_all", tokens // 2 // 4 * 3 // 4)] * 4
    if form is ByIndex:
        expected += [("all_to_all", tokens // 4 * 3 // 4)] * 4 + [("all_gather", 4 * 64 * 8 * 3 // 4)]
    assert sorted(sent) == sorted(expected)
