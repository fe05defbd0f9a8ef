"""Travelling rows in a program's file, and in one program for all numbers of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from equality import mesh_of
from mixture import Mixture

import fxshard
from fxshard import archive
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import lower_plan
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.shapes import dynamic_dims
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan


def inputs(tokens: int) -> tuple[torch.Tensor]:
    return (torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),)


def travelling(graph: PlanningGraph) -> fxshard.ShardingPlan:
    annotated = annotate(graph, mesh_of("ep=2"))
    plans = (random_graph_plan(annotated, seed) for seed in range(20))
    return next(p for p in plans if any(c.kind == "dispatch" for c in p.collectives))


@pytest.mark.parametrize("tokens", [8, 7])
def test_a_file(tmp_path: Path, tokens: int) -> None:
    model = Mixture(5, 2).double()
    program = lower_plan(graph := trace(model, inputs(tokens)), travelling(graph))
    archive.save(program, tmp_path / "experts.pt2")
    loaded = archive.load(tmp_path / "experts.pt2")
    assert loaded.collectives == program.collectives
    assert_equal_to_one_device(simulate_program(loaded, program_values(loaded, model, inputs(tokens))), one_device(model, inputs(tokens)))


def test_one_program_for_all_numbers_of_tokens() -> None:
    model = Mixture(5, 2).double()
    dims = tuple(replace(d, uneven=False) for d in dynamic_dims(model, inputs(24), {}, ({0: "tokens"},)))
    graph = trace(model, inputs(24), dynamic=dims)
    program = lower_plan(graph, travelling(graph))
    for tokens in (24, 8, 30):
        at = program_at(program, sizes_of_call(program, inputs(tokens), {}))
        found = simulate_program(at, program_values(at, model, inputs(tokens)))
        assert_equal_to_one_device(found, one_device(model, inputs(tokens)))
