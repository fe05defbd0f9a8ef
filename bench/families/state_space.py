"""State space and other recurrent models, without their custom kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.families.family import Family
from bench.families.text import GROUPED, causal

STATES = {"state_size": 4, "conv_kernel": 4, "expand": 2, "time_step_rank": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": STATES,
    "falcon_mamba": STATES,
    "mamba2": {"state_size": 4, "head_dim": 8, "num_heads": 4, "n_groups": 2, "chunk_size": 4},
    "rwkv": {"attention_hidden_size": 16, "context_length": 32},
    "jamba": GROUPED
    | {
        "mamba_d_state": 4,
        "mamba_dt_rank": 2,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "recurrent_gemma": {"lru_width": 16, "attention_window_size": 4, "block_types": ("recurrent", "attention"), "num_key_value_heads": 1},
    "bamba": GROUPED | {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 4, "attn_layer_indices": [1]},
    "lfm2": GROUPED | {"block_dim": 16, "block_ff_dim": 32, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
    "xlstm": {"num_heads": 2, "chunk_size": 4, "num_blocks": 2},
    "qwen3_next": GROUPED
    | {
        "head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}

FAMILIES = tuple(Family(name, "state space", partial(causal, name, **changes)) for name, changes in MODELS.items())
