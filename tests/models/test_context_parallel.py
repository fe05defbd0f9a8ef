"""Attention with a sharded sequence, in random plans on simulated ranks, against torch's own on one device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import Simulation, simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import Reference, assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.models.context_parallel import CausalAttention, gathered, inputs, plan_of, ring, traced, ulysses_plan
from tests.slices import diagonal

MESHES = ({"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2})
LENGTHS = (48, 7, 3)
"""Even, uneven, and with empty shards; 48 can be dealt head-to-tail on each mesh."""


@lru_cache(maxsize=16)
def reference(length: int, kv_heads: int, causal: bool) -> Reference:
    return one_device(traced(length, kv_heads, causal)[0], inputs(length))


def simulated(program: ShardedProgram, length: int, kv_heads: int = 2, causal: bool = True) -> Simulation:
    model, _ = traced(length, kv_heads, causal)
    result = simulate_program(program, program_values(program, model, inputs(length)))
    assert_equal_to_one_device(result, reference(length, kv_heads, causal))
    return result


@pytest.mark.parametrize(("mesh", "length"), diagonal(MESHES, LENGTHS))
def test_sharded_queries_and_whole_keys(mesh: dict[str, int], length: int) -> None:
    _, graph = traced(length)
    for seed in range(2):
        program = lower_plan(graph, plan_of(graph, Mesh(mesh), gathered, seed))
        simulated(program, length)
        for module in program.modules.values():
            values = [n.meta.get("val") for n in module.graph.nodes]
            assert not [v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bool and v.ndim > 1], "a dense mask"


@pytest.mark.parametrize(("mesh", "length"), diagonal([mesh for mesh in MESHES if 4 % mesh["a"] == 0], LENGTHS))
def test_ulysses(mesh: dict[str, int], length: int) -> None:
    """Queries, keys and values change from the sequence to heads by all-to-all, and the result back, uneven and empty shards too. (Four
    heads on three ranks are gathered, which is cheaper.)"""
    kv_heads = 4 if mesh["a"] > 2 else 2
    plan = ulysses_plan(length, Mesh(mesh), kv_heads)
    exchanged = [c for c in plan.collectives if c.kind == "all_to_all"]
    assert len(exchanged) >= 2 and {c.axis for c in exchanged} == {"a"}
    simulated(lower_plan(traced(length, kv_heads)[1], plan), length, kv_heads)


@pytest.mark.parametrize(("mesh", "length", "causal"), diagonal(MESHES, LENGTHS, [True, False]))
def test_ring(mesh: dict[str, int], length: int, causal: bool) -> None:
    """Of the ranks of a mesh of two axes, some may have no batch, and pass keys all the same."""
    _, graph = traced(length, 2, causal)
    for seed in range(2):
        plan = plan_of(graph, Mesh(mesh), ring, seed)
        program = lower_plan(graph, plan)
        assert "shift" in {c.kind for c in program.collectives}
        assert ("zigzag" in {c.kind for c in program.collectives}) == (causal and length == 48)
        result = simulated(program, length, 2, causal)
        want = Counter((c.kind, c.axis, c.shape) for c in program.collectives)
        assert Counter((c.kind, c.axis, c.shape) for c in result.collectives) == want
        sent = {kind: sum(c.bytes for c in plan.collectives if c.kind == kind) for kind, _, _ in want}
        assert sent == {kind: sum(c.bytes for c in program.collectives if c.kind == kind) for kind, _, _ in want}


@pytest.mark.parametrize(("mesh", "length", "size"), diagonal(MESHES, LENGTHS, [1, 3]))
def test_heads_of_values_of_another_size(mesh: dict[str, int], length: int, size: int) -> None:
    """As in multi-head latent attention, with the queries' scale: under the solver's plan, in a ring, with gathered keys and others."""
    model, graph = traced(length, 2, True, size)
    want = one_device(model, inputs(length))
    annotated = annotate(graph, Mesh(mesh))
    plans = [plan_graph(graph, Mesh(mesh), Request()), plan_of(graph, Mesh(mesh), ring, 0), plan_of(graph, Mesh(mesh), gathered, 0)]
    for plan in (*plans, *(random_graph_plan(annotated, seed) for seed in range(3))):
        program = lower_plan(graph, plan)
        assert_equal_to_one_device(simulate_program(program, program_values(program, model, inputs(length))), want)
        assert plan is not plans[1] or "shift" in {c.kind for c in program.collectives}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [ring, gathered])
def test_rounding_is_that_of_one_device(dtype: torch.dtype, wanted: Callable[[OpSpec, int], bool]) -> None:
    """Blocks are added up in float32; errors are those of gradients against float64, in the Frobenius norm."""
    torch.manual_seed(0)
    model, (x,) = CausalAttention().to(dtype), inputs(48)
    args = (x.to(dtype),)
    own, exact = one_device(model, args), one_device(copy.deepcopy(model).double(), (args[0].double(),))
    graph = trace(model, args, train=True)
    program = lower_plan(graph, plan_of(graph, Mesh({"a": 4}), wanted, 0))
    result = simulate_program(program, program_values(program, model, args))
    for name, grad in exact.grads.items():
        mine, alone = (float((found.grads[name].double() - grad).norm()) for found in (result, own))
        assert mine <= 2 * alone, name
