"""generate() of Hugging Face decoders on a mesh of one: what it needs from the module, and how many programs serve it."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values

transformers = pytest.importorskip("transformers")
Pair = tuple[nn.Module, Any]
"""A model, and the same one sharded."""

PROMPT = torch.arange(1, 17).view(2, 8)
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
ENDS = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": lambda n: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **ENDS, num_hidden_layers=n, max_position_embeddings=64)
    ),
    "mistral": lambda n, window: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, **ENDS, num_hidden_layers=n, sliding_window=window)
    ),
    "gpt2": lambda n: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_head=2, n_layer=n, n_positions=64, **ENDS)),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def pair(name: str, mesh: DeviceMesh, layers: int = 1, *sizes: int, **options: Any) -> Pair:
    torch.manual_seed(0)
    model = MODELS[name](layers, *sizes).eval()
    sharded: Any = fxshard.parallelize(copy.deepcopy(model), (PROMPT,), mesh, train=False, compiler="eager", **options)
    return model, sharded


@pytest.fixture(scope="module")
def llama(mesh: DeviceMesh) -> Pair:
    return pair("llama", mesh)


def tokens(model: Any, count: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    found: torch.Tensor = model.generate(PROMPT, max_new_tokens=count, **options)
    return found


@pytest.mark.parametrize(("name", "beams"), [("llama", True), ("gpt2", False), pytest.param("gpt2", True, marks=pytest.mark.slow)])
def test_a_static_cache_takes_a_prefill_and_a_decode_program(name: str, beams: bool, mesh: DeviceMesh, llama: Pair) -> None:
    model, sharded = llama if name == "llama" else pair(name, mesh)
    for options in ({"do_sample": False}, {"do_sample": True}, *([{"num_beams": 2}] if beams else [])):
        before = len(sharded.forward.programs)
        options = {**options, "cache_implementation": "static"}
        assert torch.equal(tokens(sharded, 10, **options), tokens(model, 10, **options))
        made = len(sharded.forward.programs) - before
        assert made == (0 if options.get("do_sample") else 2)  # beam search has another batch size


def test_a_dynamic_cache_takes_one_program_for_all_lengths(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """A second prompt length makes one more program, for all lengths; with a mask, which grows with the cache, there are programs of its
    own for prompt and tokens. No layer counts in Python."""
    model, sharded = pair("llama", mesh)
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert torch.equal(tokens(sharded, 8), tokens(model, 8))
    assert not any("a Python number" in line for line in caplog.messages)
    assert len(sharded.forward.programs) == 3  # for the example, for the prompt, for a token
    for length, masked, programs in ((8, False, 3), (12, False, 4), (5, False, 4), (8, True, 6), (11, True, 7), (6, True, 7)):
        prompt = torch.randint(1, 32, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :2] = 0
        options = {"max_new_tokens": 4, "do_sample": False, **({"attention_mask": mask} if masked else {})}
        assert torch.equal(sharded.generate(prompt, **options), model.generate(prompt, **options))
        assert len(sharded.forward.programs) == programs, (length, masked, len(sharded.forward.programs))
    cache = transformers.DynamicCache(config=model.config)
    first = sharded.generate(PROMPT, max_new_tokens=2, past_key_values=cache, return_dict_in_generate=True)
    assert first.past_key_values is cache and cache.get_seq_length() == PROMPT.shape[1] + 1
    cache.crop(-1)
    assert cache.get_seq_length() == PROMPT.shape[1]


@pytest.mark.parametrize(("window", "programs"), [(6, 3), (12, 4)])
def test_a_sliding_window_counts_its_tokens(window: int, programs: int, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """Programs for the example, for the prompt, for a token while the window has room, and for one when it is full."""
    model, sharded = pair("mistral", mesh, 2, window)
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert torch.equal(tokens(sharded, 16), tokens(model, 16))
    assert len(sharded.forward.programs) == programs
    assert not any("a Python number" in line for line in caplog.messages)


def test_attributes_that_generate_reads(llama: Pair) -> None:
    model, sharded = llama
    assert inspect.signature(sharded.forward) == inspect.signature(model.forward)
    assert sharded.device == model.device and sharded.dtype == model.dtype
    output = sharded(PROMPT, use_cache=True)
    assert type(output) is type(model(PROMPT)) and type(output.past_key_values) is transformers.DynamicCache
    assert output.past_key_values.layers[0].dtype == torch.float32


def test_output_layouts_name_tensors_of_a_cache_by_path(mesh: DeviceMesh) -> None:
    model, two = MODELS["llama"](2).eval(), fxshard.Mesh({"tp": 2})
    layouts = {"outputs['past_key_values'].layers[?].keys": "S(0)", "*.layers[1].values": "S(2)"}
    graph = trace(model, (PROMPT,), train=False)
    program = lower_plan(graph, plan_graph(graph, two, Request(train=False, output_layouts=layouts)))
    cache = simulate_program(program, program_values(program, model, (PROMPT,))).ranks["outputs[4]"]
    assert cache[0].shape == (2, 2, 4, 8)
    with pytest.raises(fxshard.FxshardError, match=r"layers\[2\].keys"):
        plan_graph(graph, two, Request(train=False, output_layouts={"outputs['past_key_values'].layers[2].keys": "S(0)"}))
