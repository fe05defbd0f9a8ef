"""Attention with a sharded sequence, in random plans on simulated ranks, against torch's own on one device."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import lower_plan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import Reference, assert_equal_to_one_device, one_device
from tests.models.context_parallel import gathered, inputs, plan_of, traced

MESHES = ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2})
LENGTHS = (12, 7, 3)
"""Even, uneven, and with empty shards."""


@lru_cache(maxsize=16)
def reference(length: int, kv_heads: int, causal: bool) -> Reference:
    return one_device(traced(length, kv_heads, causal)[0], inputs(length))


def simulated(program: ShardedProgram, length: int, kv_heads: int = 2, causal: bool = True) -> None:
    model, _ = traced(length, kv_heads, causal)
    result = simulate_program(program, program_values(program, model, inputs(length)))
    assert_equal_to_one_device(result, reference(length, kv_heads, causal))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_sharded_queries_and_whole_keys(mesh: dict[str, int], length: int) -> None:
    _, graph = traced(length)
    for seed in range(2):
        program = lower_plan(graph, plan_of(graph, Mesh(mesh), gathered, seed))
        simulated(program, length)
        for module in program.modules.values():
            values = [n.meta.get("val") for n in module.graph.nodes]
            assert not [v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bool and v.ndim > 1], "a dense mask"
