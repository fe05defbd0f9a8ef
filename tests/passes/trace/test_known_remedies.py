"""Models that are known not to trace with their defaults: the error names the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxshard
from fxshard.errors import TraceError

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(1, 9).view(1, 8)


def mixtral(experts: str) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4, vocab_size=32))
    model.set_experts_implementation(experts)
    return model.eval()


@pytest.mark.parametrize("experts, dtype", [("batched_mm", torch.float32), ("grouped_mm", torch.float32), ("grouped_mm", torch.bfloat16)])
def test_experts_as_one_product_are_planned(experts: str, dtype: torch.dtype) -> None:
    assert fxshard.plan(mixtral(experts).to(dtype), (TOKENS,), fxshard.Mesh({"ep": 2}), train=False).nodes


def test_the_error_names_the_remedy() -> None:
    with pytest.raises(TraceError) as error:
        fxshard.plan(mixtral("eager"), (TOKENS,), fxshard.Mesh({"ep": 2}), train=False)
    assert error.value.remedy is not None and 'set_experts_implementation("grouped_mm")' in error.value.remedy
    assert error.value.where is not None and "transformers" in error.value.where
