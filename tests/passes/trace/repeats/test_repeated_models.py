"""Hugging Face models, whose layers know their index: traced as four if the forward does not read it, with the same graph either way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from tests.passes.trace.repeats.test_repeated import checked, traced_as_four

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 6}
IDS = torch.zeros(2, 16, dtype=torch.int64)
TEXT = {"input_ids": IDS, "labels": IDS}
Case = tuple[nn.Module, dict[str, Any]]


def gpt2(**more: Any) -> Case:
    config = tf.GPT2Config(n_layer=6, n_embd=32, n_head=4, vocab_size=64, n_positions=32, use_cache=False, **more)
    return tf.GPT2LMHeadModel(config), TEXT


def bert() -> Case:
    model = tf.BertForMaskedLM(tf.BertConfig(**SIZES, vocab_size=64, max_position_embeddings=32))
    return model, {**TEXT, "attention_mask": torch.ones_like(IDS)}


def t5() -> Case:
    sizes = {"num_layers": 6, "num_decoder_layers": 7, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, vocab_size=64, decoder_start_token_id=0, use_cache=False)), TEXT


def vit() -> Case:
    model = tf.ViTForImageClassification(tf.ViTConfig(**SIZES, image_size=32, patch_size=8))
    return model, {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": IDS[:, 0]}


def llama() -> Case:
    config = tf.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64, max_position_embeddings=32, use_cache=False)
    return tf.LlamaForCausalLM(config), TEXT


TRACED_AS_FOUR = {
    gpt2: "transformer.h.0 to transformer.h.5",
    bert: "bert.encoder.layer.0 to bert.encoder.layer.5",
    t5: "encoder.block.1 to encoder.block.5, decoder.block.1 to decoder.block.6",
    vit: "vit.layers.0 to vit.layers.5",
    llama: "model.layers.0 to model.layers.5",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", TRACED_AS_FOUR)
@pytest.mark.parametrize("train", [True, False])
def test_a_model_of_transformers(make: Callable[[], Case], train: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxshard")
    model, kwargs = make()
    checked(model.train(train), (), kwargs, train=train)
    assert traced_as_four(caplog) == TRACED_AS_FOUR[make]


def test_layers_that_scale_by_their_index_are_traced_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxshard")
    model, kwargs = gpt2(scale_attn_by_inverse_layer_idx=True)
    checked(model.eval(), (), kwargs, train=False)
    assert not traced_as_four(caplog)
