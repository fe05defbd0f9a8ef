"""Attention with a sharded sequence of any length, in one program; and a ring in a program's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import nn

from fxshard import archive
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import lower_plan
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.shapes import dynamic_dims
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.models.context_parallel import CausalAttention, gathered, inputs, plan_of, ring, traced


@lru_cache(maxsize=2)
def of_any_length(uneven: bool) -> tuple[nn.Module, PlanningGraph]:
    torch.manual_seed(0)
    model = CausalAttention().double()
    dims = tuple(replace(d, uneven=uneven) for d in dynamic_dims(model, inputs(48), {}, ({1: "length"},)))
    return model, trace(model, inputs(48), dynamic=dims)


def shifted(subject: ShardingPlan | ShardedProgram) -> int:
    """Bytes sent around rings, at the example's sizes."""
    return sum(c.bytes for c in subject.collectives if c.kind == "shift")


@pytest.mark.parametrize(("wanted", "uneven", "lengths"), [(ring, True, (12, 7, 3)), (ring, False, (48, 60)), (gathered, True, (12, 7, 3))])
def test_one_program_for_all_lengths(wanted: Callable[[OpSpec, int], bool], uneven: bool, lengths: tuple[int, ...]) -> None:
    model, graph = of_any_length(uneven)
    for seed, mesh in enumerate(({"a": 3}, {"a": 2, "b": 2})):
        program = lower_plan(graph, plan_of(graph, Mesh(mesh), wanted, seed))
        assert "zigzag" not in {c.kind for c in program.plan.collectives}, "not all lengths can be dealt head-to-tail"
        assert shifted(program.plan) == shifted(program)
        for length in lengths:
            sizes = sizes_of_call(program, inputs(length), {})
            assert program.refuses(sizes) is None, program.guards
            at = program_at(program, sizes)
            result = simulate_program(at, program_values(at, model, inputs(length)))
            assert_equal_to_one_device(result, one_device(model, inputs(length)))


@pytest.mark.parametrize("length", [48, 7])
def test_a_ring_in_a_file(tmp_path: Path, length: int) -> None:
    model, graph = traced(length)
    program = lower_plan(graph, plan_of(graph, Mesh({"a": 2}), ring, 0))
    archive.save(program, tmp_path / "ring.pt2")
    loaded = archive.load(tmp_path / "ring.pt2")
    assert loaded.collectives == program.collectives
    result = simulate_program(loaded, program_values(loaded, model, inputs(length)))
    assert_equal_to_one_device(result, one_device(model, inputs(length)))
