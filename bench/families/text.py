"""Language models of Hugging Face: decoders, encoders, and encoders with a decoder."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench.families.family import TINY, Case, Family, Loss, config_of, tokens


def causal(model_type: str, dropout: bool, **changes: Any) -> Case:
    """A decoder that predicts the next token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(model_type, dropout, use_cache=False, **{**TINY, **changes}))
    ids = tokens()
    return Loss(model, shift=True), (), {"input_ids": ids, "target": ids}


def masked(model_type: str, dropout: bool, **changes: Any) -> Case:
    """An encoder that predicts masked tokens; the last tokens of the first row are padding."""
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_config(config_of(model_type, dropout, **{**TINY, **changes}))
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return Loss(model), (), {"input_ids": ids, "attention_mask": mask, "target": ids}


def translated(model_type: str, dropout: bool, **changes: Any) -> Case:
    """An encoder of 8 tokens and a decoder of 6."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(config_of(model_type, dropout, use_cache=False, **{**TINY, **changes}))
    ids = tokens(length=6)
    return Loss(model), (), {"input_ids": tokens(), "decoder_input_ids": ids, "target": ids}


GROUPED = {"num_key_value_heads": 2}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 2}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
SMALL = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32}
PAIRS = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}

DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 4},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 4},
    "gemma2": GROUPED | {"head_dim": 4, "sliding_window": 4},
    "gemma3_text": GROUPED | {"head_dim": 4, "sliding_window": 4},
    "phi": {},
    "phi3": GROUPED,
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "deberta-v2": PAIRS,
    "albert": {"embedding_size": 8},
    "electra": {"embedding_size": 8},
    "distilbert": SMALL,
    "modernbert": {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "mpnet": {},
    "squeezebert": {"embedding_size": 16},
    "fnet": {},
}
PAIRED: dict[str, dict[str, Any]] = {
    "t5": T5,
    "bart": BART,
    "pegasus": BART,
    "pegasus_x": BART | {"block_size": 4, "num_global_tokens": 2},
}

FAMILIES = (
    *(Family(name, "decoder", partial(causal, name, **changes)) for name, changes in DECODERS.items()),
    *(Family(name, "encoder", partial(masked, name, **changes)) for name, changes in ENCODERS.items()),
    *(Family(name, "encoder-decoder", partial(translated, name, **changes)) for name, changes in PAIRED.items()),
)
