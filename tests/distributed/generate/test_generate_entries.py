"""generate() of models that it calls in parts: encoder-decoders, whose encoder runs by itself, and wrappers around a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from tests.distributed.generate.test_generate import llama
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
PROMPT = torch.arange(3, 19).view(2, 8)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)).double().eval()


class Wrapper(nn.Module):
    """Hands what it lacks to the model in it, as peft's wrappers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


def parallelized(model: nn.Module, **given: torch.Tensor) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options: dict[str, Any] = {"train": False, "compiler": "eager", "parallel": {"tp": fxshard.TensorParallel()}}
    return fxshard.parallelize(copy.deepcopy(model), (), mesh, example_kwargs=given, **options)


def same_tokens(model: Any, sharded: Any, tokens: int = 4, **options: Any) -> None:
    steps: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, **options}
    torch.testing.assert_close(sharded.generate(PROMPT, **steps), model.generate(PROMPT, **steps), rtol=0, atol=0)


def encoder_decoder() -> None:
    """The encoder has programs of its own, and so has the whole model, in whose trace the encoder is the original one. A copy has them too,
    and may have other weights."""
    model, given = t5(), {"input_ids": PROMPT, "decoder_input_ids": PROMPT}
    sharded = parallelized(model, **given)
    same_tokens(model, sharded)
    encoder, twin = sharded.get_encoder(), copy.deepcopy(sharded)
    assert any(isinstance(p, DTensor) and not all(x.is_replicate() for x in p.placements) for p in encoder.parameters())
    assert len(encoder.forward.programs) == 1 and encoder.forward.programs[0].collectives
    other: Any = t5()
    with torch.no_grad():
        other.get_parameter("shared.weight").mul_(2)
        twin.load_state_dict(other.state_dict())
        for one, there in ((model, sharded), (other, twin)):
            want, have = (m.get_encoder()(input_ids=PROMPT).last_hidden_state for m in (one, there))
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(there(**given).logits, one(**given).logits, rtol=1e-9, atol=1e-9)
    assert len(encoder.forward.programs) == len(twin.get_encoder().forward.programs) == 2  # of generate(), and of this call


def wrapped() -> None:
    model = Wrapper(llama())
    sharded = parallelized(model, input_ids=PROMPT)
    same_tokens(model, sharded)
    assert len(sharded.forward.programs) == 1 and len(sharded.base_model.forward.programs) == 2  # the example's; the prompt's, a token's


found, test_two_ranks = two_ranks(encoder_decoder, wrapped)
