"""Attention under a causal mask, or one that hides nothing, is traced without the mask, and has the numbers of the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import lower_plan
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.shapes import dynamic_dims
from fxshard.testing import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.models.context_parallel import plan_of, ring

Mask = Callable[[int, int], Tensor | None]


class Masked(nn.Module):
    """Attention of queries [batch, 2 heads, s, 4] to keys [batch, 2, t, 4] under a mask made in the forward from s and t."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * self.scale, k, k, attn_mask=self.mask(q.shape[-2], k.shape[-2]))


def operands(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(queries)
    q, k = (torch.randn(2, 2, n, 4, dtype=torch.float64, generator=make) for n in (queries, keys))
    return q, k


def attention(graph: PlanningGraph) -> list[tuple[Any, Any]]:
    """(mask, is_causal) of each attention, then of each backward."""
    calls = [n for n in graph.nodes if "fxshard.sdpa" in str(n.target)]
    return [tuple(n.args[6:8] if "backward" in str(n.target) else n.args[3:5]) for n in calls]


def simulated(program: ShardedProgram, model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor] | None = None) -> None:
    result = simulate_program(program, program_values(program, model, args, kwargs))
    assert_equal_to_one_device(result, one_device(model, args, kwargs))


def tril(s: int, t: int) -> Tensor:
    return torch.ones(s, t, dtype=torch.bool).tril()


def last_queries(s: int, t: int) -> Tensor:
    """Queries are the last ``s`` of ``t`` tokens."""
    return torch.arange(t)[None] <= torch.arange(s)[:, None] + (t - s)


MASKS: dict[str, tuple[Mask, tuple[int, int], tuple[Any, Any] | None]] = {
    "causal": (tril, (6, 6), (None, True)),
    "fewer queries, from the first": (tril, (3, 6), (None, True)),
    "added": (lambda s, t: torch.full((s, t), -math.inf, dtype=torch.float64).triu(1), (6, 6), (None, True)),
    "of one batch and head": (lambda s, t: tril(s, t)[None, None].expand(2, 1, s, t), (6, 6), (None, True)),
    "of the last query": (last_queries, (1, 6), (None, False)),
    "of the last queries": (last_queries, (3, 6), None),
    "all": (lambda s, t: torch.ones(s, t, dtype=torch.bool), (6, 6), (None, False)),
    "nothing added": (lambda s, t: torch.zeros(s, t, dtype=torch.float64), (6, 6), (None, False)),
    "a number added": (lambda s, t: torch.full((s, t), 2.0, dtype=torch.float64).triu(1), (6, 6), None),
    "said twice": (lambda s, t: tril(s, t) & (torch.arange(t) < torch.arange(s)[:, None] + 1), (6, 6), (None, True)),
    "the diagonal above too": (lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(1), (6, 6), None),
    "1 added": (lambda s, t: torch.zeros(s, t, dtype=torch.float64).masked_fill(tril(s, t), True), (6, 6), None),
    "as in Llama": (lambda s, t: torch.full((s, t), -math.inf).triu(1).to(torch.float64)[None, None], (6, 6), (None, True)),
    "as in nanoGPT": (lambda s, t: torch.ones(s, t).tril().view(1, 1, s, t) != 0, (6, 6), (None, True)),
    "of nn.Transformer": (lambda s, t: nn.Transformer.generate_square_subsequent_mask(s, dtype=torch.float64), (6, 6), (None, True)),
    "a window": (lambda s, t: tril(s, t) & ~torch.ones(s, t, dtype=torch.bool).tril(-3), (6, 6), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_a_forward(name: str) -> None:
    mask, sizes, want = MASKS[name]
    model, args = Masked(mask), operands(*sizes)
    graph = trace(model, args)
    for found in attention(graph):
        assert found == want if want is not None else isinstance(found[0], fx.Node) and found[1] is False
    simulated(lower_plan(graph, random_graph_plan(annotate(graph, Mesh({"a": 2})), 0)), model, args)


def test_a_mask_that_is_an_input_stays() -> None:
    class Given(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    ((mask, is_causal),) = attention(trace(Given(), (operands(4, 4)[0], tril(4, 4)), train=False))
    assert isinstance(mask, fx.Node) and not is_causal


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}


@lru_cache(maxsize=1)
def decoder() -> nn.Module:
    """A Llama with norms that compute in float64, where Llama's own compute in float32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    for name, norm in [(n, m) for n, m in model.named_modules() if isinstance(m, LlamaRMSNorm)]:
        model.set_submodule(name, nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon))
    return model.double()


def tokens(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(length))}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_in_a_decoder_of_transformers(ranks: int) -> None:
    graph = trace(decoder(), (), tokens(12))
    assert set(attention(graph)) == {(None, True)}
    program = lower_plan(graph, plan_of(graph, Mesh({"cp": ranks}), ring, 1))
    assert {"shift", "zigzag"} <= {one.kind for one in program.collectives}
    simulated(program, decoder(), (), tokens(12))


def test_a_ring_of_any_length() -> None:
    dims = dynamic_dims(decoder(), (), tokens(12), {name: {1: "length"} for name in tokens(12)})
    graph = trace(decoder(), (), tokens(12), dynamic=dims)
    assert set(attention(graph)) == {(None, True)}
    program = lower_plan(graph, plan_of(graph, Mesh({"cp": 2}), ring, 1))
    for length in (12, 8, 20):
        simulated(program_at(program, {"length": length}), decoder(), (), tokens(length))


def test_a_sliding_window_of_transformers_stays() -> None:
    with torch.device("meta"):
        model = MistralForCausalLM(MistralConfig(**SIZES, use_cache=False, sliding_window=4))
    assert all(isinstance(mask, fx.Node) for mask, _ in attention(trace(model, (), tokens(12))))


def test_padding_of_transformers_stays() -> None:
    given = {**tokens(12), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    assert all(isinstance(mask, fx.Node) for mask, _ in attention(trace(decoder(), (), given)))
