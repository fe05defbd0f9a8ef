"""generate() with a cache that grows, on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fxshard
from tests.distributed.generate.test_generate import BY_HEADS, COLUMNS, PROMPT, inductor_graphs, llama, same_tokens
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


def dynamic_cache() -> None:
    """One program for the prompt and one for each further token, at any length of the cache, which keeps its layout."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = llama()
    sharded: Any = fxshard.parallelize(
        copy.deepcopy(model), (PROMPT,), mesh, train=False, compiler="eager", pins=COLUMNS, output_layouts=BY_HEADS
    )
    same_tokens(model, sharded, 8, False)
    same_tokens(model, sharded, 8, True)
    assert len(sharded.forward.programs) == 3  # with that of the example
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    same_tokens(model, sharded, 4, False, attention_mask=mask)  # the mask is one longer than the cache and grows with it
    assert len(sharded.forward.programs) == 5
    mine, want = (m.generate(PROMPT, max_new_tokens=3, return_dict_in_generate=True) for m in (sharded, model))
    for cache in (mine.past_key_values, want.past_key_values):
        cache.crop(-1)
    keys, whole = (found.past_key_values.layers[0].keys for found in (mine, want))
    assert isinstance(keys, DTensor) and keys.placements == (Shard(1),)
    torch.testing.assert_close(keys.full_tensor(), whole, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"torch\.Tensor and DTensor"):
        mine.past_key_values.reorder_cache(torch.tensor([1, 0]))
    mine.past_key_values.reset()
    assert mine.past_key_values.get_seq_length() == 0


def compiled_dynamic_cache() -> None:
    """Three compilations for any number of tokens: the example, the prompt, and a further token with a cache of any length."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = llama()
    torch._dynamo.utils.counters.clear()
    sharded: Any = fxshard.parallelize(copy.deepcopy(model), (PROMPT,), mesh, train=False, pins=COLUMNS, output_layouts=BY_HEADS)
    same_tokens(model, sharded, 6, False)
    same_tokens(model, sharded, 9, True)
    assert inductor_graphs() == len(sharded.forward.programs) == 3


found, test_two_ranks = two_ranks(dynamic_cache, compiled_dynamic_cache)
