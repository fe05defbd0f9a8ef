"""Attention with a sharded sequence on two ranks over gloo: eager and compiled, static and of any length, against one device."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.runtime.ranks.record import record_collectives
from fxshard.testing.random_plan import random_graph_plan
from tests.distributed.scenarios import two_ranks
from tests.distributed.sizes.test_any_size import same, step
from tests.models.context_parallel import CausalAttention, gathered, inputs, plan_of, ring, traced, ulysses_plan, with_attention
from tests.passes.trace.rewrites.test_known_masks import decoder, tokens

pytestmark = pytest.mark.distributed


def _planned(wanted: Callable[[OpSpec, int], bool], length: int, compiler: str) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model, graph = traced(length)
    plan = plan_of(graph, fxshard.Mesh({"cp": 2}), wanted, 1)
    single = copy.deepcopy(model)
    sharded = fxshard.parallelize(copy.deepcopy(model), inputs(length), mesh, plan=plan, compiler=compiler, cache=False)
    same(sharded, single, inputs(length))
    return sharded


def gathered_keys() -> None:
    _planned(gathered, 12, "eager")


def gathered_keys_compiled_uneven() -> None:
    _planned(gathered, 7, "inductor")


def ulysses() -> None:
    for length in (12, 7):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        model = traced(length)[0]
        given: Any = {"plan": ulysses_plan(length, fxshard.Mesh({"a": 2})), "compiler": "eager", "cache": False}
        sharded = fxshard.parallelize(copy.deepcopy(model), inputs(length), mesh, **given)
        same(sharded, copy.deepcopy(model), inputs(length))
        with record_collectives() as issued:
            step(sharded, inputs(length))
        assert sum("all_to_all" in one.kind for one in issued) >= 2


def ring_of_two() -> None:
    _planned(ring, 12, "eager")


def ring_of_two_compiled_uneven() -> None:
    """A recording of a step lists the shifts of the program."""
    sharded = _planned(ring, 7, "inductor")
    with record_collectives() as issued:
        step(sharded, inputs(7))
    (program,) = sharded.forward.programs
    found = Counter((c.kind, c.axis, c.shape) for c in issued if c.kind == "shift")
    assert found == Counter((c.kind, c.axis, c.shape) for c in program.collectives if c.kind == "shift")
    assert found


class Logits(nn.Module):
    """A decoder of transformers, which makes its causal mask as a tensor when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = copy.deepcopy(decoder())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(input_ids=ids).logits


def ring_of_a_decoder_of_transformers() -> None:
    args = (tokens(12)["input_ids"],)
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), Logits()
    annotated = with_attention(annotate(trace(model, args), fxshard.Mesh({"cp": 2})), ring)
    single, plan = copy.deepcopy(model), random_graph_plan(annotated, 1, whole_outputs=True)
    assert "zigzag" in {one.kind for one in plan.collectives}
    same(fxshard.parallelize(model, args, mesh, plan=plan, compiler="eager", cache=False), single, args)


def any_length() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = CausalAttention().double()
    single = copy.deepcopy(model)
    sharded = fxshard.parallelize(
        model,
        inputs(12),
        mesh,
        parallel={"cp": fxshard.ContextParallel(dim=1)},
        dynamic_shapes={"x": {1: "length"}},
        compiler="eager",
        cache=False,
    )
    for length in (12, 8, 7, 5, 1):
        same(sharded, single, inputs(length))


found, test_two_ranks = two_ranks(
    gathered_keys,
    gathered_keys_compiled_uneven,
    ulysses,
    ring_of_two,
    ring_of_two_compiled_uneven,
    ring_of_a_decoder_of_transformers,
    any_length,
)
