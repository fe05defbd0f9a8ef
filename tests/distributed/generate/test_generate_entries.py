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
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
PROMPT = torch.arange(3, 19).view(2, 8)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)).double().eval()


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}
    config = BartConfig(**layers, d_model=32, vocab_size=64, max_position_embeddings=64, eos_token_id=None, forced_eos_token_id=None)
    return BartForConditionalGeneration(config).double().eval()


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


def same_tokens(model: nn.Module, **options: Any) -> Any:
    """The sharded copy, after it has generated the tokens of one device, and computed its logits."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    given = {"input_ids": PROMPT} | ({"decoder_input_ids": PROMPT} if model.config.is_encoder_decoder else {})
    parallel = {"tp": fxshard.TensorParallel()}
    sharded: Any = fxshard.parallelize(
        copy.deepcopy(model), (), mesh, example_kwargs=given, train=False, compiler="eager", parallel=parallel, output_layouts="R"
    )
    for steps in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
        want = model.generate(input_ids=PROMPT, max_new_tokens=6, **steps, **options)
        have = sharded.generate(input_ids=PROMPT, max_new_tokens=6, **steps, **options)
        torch.testing.assert_close(have, want, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(sharded(**given).logits, model(**given).logits, rtol=1e-9, atol=1e-9)
    return sharded


def check_encoder(sharded: Any, encoder: Any, want: Any) -> None:
    """The encoder's own program is sharded, and serves its next call; the whole model's trace does not contain it as a call."""
    assert any(isinstance(p, DTensor) and not all(x.is_replicate() for x in p.placements) for p in encoder.parameters())
    assert len(encoder.forward.programs) == 1 and encoder.forward.programs[0].collectives
    with torch.no_grad():
        torch.testing.assert_close(encoder(input_ids=PROMPT).last_hidden_state, want, rtol=1e-9, atol=1e-9)


def encoder_decoders() -> None:
    for model in (t5(), bart()):
        with torch.no_grad():
            want = model.get_encoder()(input_ids=PROMPT).last_hidden_state
        sharded = same_tokens(model)
        check_encoder(sharded, sharded.get_encoder(), want)


def wrapped() -> None:
    same_tokens(Wrapper(t5()))


def copied_and_loaded() -> None:
    """A copy has programs of its own, and whole values are loaded everywhere."""
    model = t5()
    sharded = same_tokens(model)
    other, twin = t5(), copy.deepcopy(sharded)
    with torch.no_grad():
        other.get_parameter("shared.weight").mul_(2)
    twin.load_state_dict(other.state_dict())
    steps: dict[str, Any] = {"input_ids": PROMPT, "max_new_tokens": 4, "do_sample": False}
    torch.testing.assert_close(twin.generate(**steps), other.generate(**steps), rtol=0, atol=0)
    torch.testing.assert_close(sharded.generate(**steps), model.generate(**steps), rtol=0, atol=0)


found, test_two_ranks = two_ranks(encoder_decoders, wrapped, copied_and_loaded)
