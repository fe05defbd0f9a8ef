"""Models of real size with their training loss, without weights: ``MODELS[name](layers)`` gives (model, args, kwargs) on meta.

Those of Hugging Face are made from a config alone, as in ``bench.families``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.families.family import Case, Loss, config_of

LENGTH, BATCH = 8192, 16


def llama(layers: int) -> Case:
    """Llama 3 8B in bfloat16 (that of ``examples``), 16 sequences of 8192 tokens."""
    from examples.llama import Llama, LlamaConfig

    with torch.device("meta"):
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
        return Llama(LlamaConfig(layers=layers)).to(torch.bfloat16), (ids, ids), {}


def t5(layers: int) -> Case:
    """T5 base (transformers' T5ForConditionalGeneration with dropout): ``layers`` in each of encoder and decoder; 64 x 512 tokens."""
    from transformers import T5ForConditionalGeneration

    sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "vocab_size": 32128, "decoder_start_token_id": 0}
    config = config_of("t5", True, num_layers=layers, num_decoder_layers=layers, use_cache=False, **sizes)
    with torch.device("meta"):
        ids = torch.zeros(64, 512, dtype=torch.int64)
        return Loss(T5ForConditionalGeneration(config)), (), {"input_ids": ids, "decoder_input_ids": ids, "target": ids}


def moe(layers: int, experts: int = 32, batch: int = 16) -> Case:
    """A mixture of experts (transformers' Qwen3MoeForCausalLM, 4 active), width 2048; ``batch`` x 2048 tokens in bfloat16."""
    from transformers import AutoModelForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    active = {"num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "vocab_size": 151936}
    config = config_of("qwen3_moe", False, num_hidden_layers=layers, use_cache=False, **sizes, **active)
    with torch.device("meta"):
        ids = torch.zeros(batch, 2048, dtype=torch.int64)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return Loss(model, shift=True), (), {"input_ids": ids, "target": ids}


def moe128(layers: int) -> Case:
    """128 experts and 64 sequences, so that two axes of 8 ranks share both evenly."""
    return moe(layers, 128, 64)


MODELS: dict[str, Callable[[int], Case]] = {"llama": llama, "t5": t5, "moe": moe, "moe128": moe128}
