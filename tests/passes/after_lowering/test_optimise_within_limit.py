"""Passes after lowering that would exceed the plan's memory limit are left out; checked by the memory that an eager rank allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.after_lowering.optimise import OPTIMISATIONS, optimised
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.memory import measure_memory

LAYERS, WIDTH = 6, 32


def network() -> nn.Module:
    """Layers of one shape: in the lowered graph all weights share one fake tensor, and so do the results of equal calls."""
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def measured(program: ShardedProgram, model: nn.Module, args: tuple[torch.Tensor, ...]) -> int:
    return measure_memory(program, program_values(program, model, args, {})).peak


def lowered(limit: int | None, weights: str) -> tuple[ShardedProgram, nn.Module, tuple[torch.Tensor, ...]]:
    """A program before any pass. The plan was made without a limit; ``limit`` is for the passes only."""
    torch.manual_seed(0)
    model, args = network(), (torch.randn(8, WIDTH),)
    graph = trace(model, args)
    pins = {n: weights for n, _ in model.named_parameters()}
    plan = plan_graph(graph, parse_mesh("dp=2"), Request(input_layouts="S(0)", output_layouts="S(0)", pins=pins, cache=False))
    return lower_plan(graph, replace(plan, memory_limit=limit), without=list(OPTIMISATIONS)), model, args


@pytest.mark.parametrize("weights", ["R", "S(0)"], ids=["gradients", "weights"])
def test_no_pass_exceeds_the_limit(weights: str) -> None:
    """A bucket of gradients, or of weights, holds all of them at once. A limit equal to the memory before the passes excludes that."""
    program, model, args = lowered(None, weights)
    before = measured(program, model, args)
    free = after_all(program)
    assert measured(free, model, args) > before, "the test needs passes that take more memory without a limit"
    program, model, args = lowered(before, weights)
    within = after_all(program)
    assert measured(within, model, args) <= before
    reasons = [e.left_out or "" for e in within.effects]
    assert any("bytes more than memory_limit" in reason for reason in reasons), reasons


def test_a_pass_within_the_limit_is_taken() -> None:
    program, model, args = lowered(None, "R")
    free = after_all(program)
    program, *_ = lowered(measured(free, model, args) + 256, "R")
    assert [c.kind for c in after_all(program).collectives] == [c.kind for c in free.collectives]


def after_all(program: ShardedProgram) -> ShardedProgram:
    for name in OPTIMISATIONS:
        program = optimised(program, name)
    return program
