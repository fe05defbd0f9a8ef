"""Plans of a small mixture of experts on simulated ranks, and whether each equals one device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from equality import mesh_of
from mixture import Mixture

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device


@lru_cache(maxsize=4)
def prepared(experts: int, tokens: int, choices: int = 2) -> tuple[Any, PlanningGraph, Any]:
    model, x = Mixture(experts, choices).double(), torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    args = (x.requires_grad_(),)
    return (model, args, {}), trace(model, args), one_device(model, args, {})


def check(plan: fxshard.ShardingPlan, experts: int, tokens: int, choices: int = 2) -> Any:
    case, graph, reference = prepared(experts, tokens, choices)
    assert fxshard.ShardingPlan.from_json(plan.to_json()) == plan
    program = lower_plan(graph, plan)
    found = simulate_program(program, program_values(program, *case))
    assert_equal_to_one_device(found, reference)
    assert [(c.kind, c.axis, c.shape) for c in found.collectives] == [(c.kind, c.axis, c.shape) for c in program.collectives]
    return program


def least_sent(mesh: str, choices: int, tokens: str = "S(0)", experts: str = "S(0)") -> tuple[fxshard.ShardingPlan, set[tuple[str, int]]]:
    """The plan of 64 tokens and 4 experts that sends least for these layouts of tokens and of matrices; (kind, bytes) of what it sends of
    the rows or tokens."""
    request = Request(pins={"up": experts, "down": experts}, input_layouts=tokens, output_layouts=tokens, objective="communication")
    plan = plan_graph(prepared(4, 64, choices)[1], mesh_of(mesh), request)
    check(plan, 4, 64, choices)
    return plan, {(c.kind, c.bytes) for c in plan.collectives if c.bytes > 1500}


ROWS = 64 * 8 * 8
"""Bytes of all tokens; rows of a rank's tokens that go to other ranks, and as many back, are (n - 1) / n of its k / n tokens."""
