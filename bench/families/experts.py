"""Mixtures of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.families.family import Family
from bench.families.text import GROUPED, causal

MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": MOE | {"head_dim": 4},
    "olmoe": MOE,
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gpt_oss": GROUPED | {"num_local_experts": 4, "head_dim": 4},
    "phimoe": GROUPED | {"num_local_experts": 4},
    "granitemoe": GROUPED | {"num_local_experts": 4},
}

FAMILIES = tuple(Family(name, "mixture of experts", partial(causal, name, **changes)) for name, changes in EXPERTS.items())
