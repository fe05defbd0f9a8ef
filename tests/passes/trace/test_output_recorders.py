"""Outputs that transformers records by hooks: hidden states, attentions, logits of routers and the loss that balances experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fxshard
from fxshard.errors import TraceError

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16},
}
TOKENS = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options))


def mixture() -> Any:
    torch.manual_seed(0)
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **own, output_router_logits=True))
    model.set_experts_implementation("grouped_mm")
    return model


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "hidden states, asked for in the call": (llama, {"output_hidden_states": True}, "hidden_states"),
    "attentions, asked for in the call": (lambda: llama(attn_implementation="eager"), {"output_attentions": True}, "attentions"),
    "logits of routers, asked for in the config": (mixture, {}, "router_logits"),
}


@pytest.mark.parametrize("name", CASES)
def test_recorded_outputs(name: str) -> None:
    """In float32, in which transformers computes some of it whatever the model's dtype."""
    make, options, recorded = CASES[name]
    model, given = make(), {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False, **options}
    plan = fxshard.plan(model, (), fxshard.Mesh({"tp": 2}), example_kwargs=given, time_limit=10)
    found = fxshard.simulate(model, (), plan, kwargs=given)
    wanted = make()(**given)
    assert len(wanted[recorded]) in (2, 3)
    for key in ("loss", "logits", recorded):
        torch.testing.assert_close(found.outputs[key], wanted[key], rtol=1e-4, atol=1e-5)


def test_nothing_is_installed_where_nothing_is_asked_for() -> None:
    model = llama()
    fxshard.plan(model, (), fxshard.Mesh({"tp": 2}), example_kwargs={"input_ids": TOKENS, "use_cache": False}, time_limit=10)
    assert not any(part._forward_hooks for part in model.modules())


def test_a_cache_among_the_results_has_its_remedy() -> None:
    with pytest.raises(TraceError, match="use_cache=False"):
        fxshard.plan(mixture(), (), fxshard.Mesh({"tp": 2}), example_kwargs={"input_ids": TOKENS, "labels": TOKENS}, time_limit=10)
