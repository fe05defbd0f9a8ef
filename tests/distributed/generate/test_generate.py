"""generate() of a Hugging Face decoder with a static cache on two ranks: the tokens of one device, from a prefill and a decode program."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fxshard
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
PROMPT = torch.arange(1, 17).view(2, 8)
BY_HEADS = {"*.keys": "S(1)", "*.values": "S(1)"}
COLUMNS = {"*.[qkv]_proj.weight": "S(0)", "*.o_proj.weight": "S(1)"}


def llama(layers: int = 1) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def same_tokens(model: nn.Module, sharded: Any, tokens: int, sample: bool, **options: Any) -> None:
    options = {"max_new_tokens": tokens, "do_sample": sample, **options}
    torch.manual_seed(1)
    want = model.generate(PROMPT, **options)
    torch.manual_seed(1)
    torch.testing.assert_close(sharded.generate(PROMPT, **options), want, rtol=0, atol=0)


def inductor_graphs() -> int:
    compiled = torch._dynamo.utils.counters["inductor"]
    return sum(compiled[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass"))


def static_cache() -> None:
    """Compiled by Inductor. The cache is sharded by heads. There are two programs besides the example's, for any number of tokens."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = llama()
    torch._dynamo.utils.counters.clear()
    sharded: Any = fxshard.parallelize(copy.deepcopy(model), (PROMPT,), mesh, train=False, pins=COLUMNS, output_layouts=BY_HEADS)
    same_tokens(model, sharded, 12, False, cache_implementation="static")
    same_tokens(model, sharded, 12, True, cache_implementation="static")
    assert inductor_graphs() == len(sharded.forward.programs) == 3  # the example's, prefill and decode
    result = sharded.generate(PROMPT, max_new_tokens=4, cache_implementation="static", return_dict_in_generate=True)
    keys = result.past_key_values.layers[0].keys
    assert isinstance(keys, DTensor) and keys.placements == (Shard(1),) and keys.to_local().shape[1] == 1
    decode = sharded.forward.programs[-1]
    assert decode.collectives and not any(20 in c.shape for c in decode.collectives)  # decoding does not send the 20 cached positions


def whole_static_cache() -> None:
    """If no layout is asked for, the cache holds plain tensors, and beam search can reorder it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = llama()
    sharded: Any = fxshard.parallelize(copy.deepcopy(model), (PROMPT,), mesh, train=False, compiler="eager", pins=COLUMNS)
    same_tokens(model, sharded, 6, False, cache_implementation="static", num_beams=2)
    result = sharded.generate(PROMPT, max_new_tokens=4, cache_implementation="static", return_dict_in_generate=True)
    assert type(result.past_key_values.layers[0].keys) is torch.Tensor


found, test_two_ranks = two_ranks(static_cache, whole_static_cache)
