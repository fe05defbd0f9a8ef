"""Attention with a key-value cache that stays sharded between calls, on two ranks: planned once for prefill and once for decode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

import fxshard
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
HEADS, WIDTH, PLACES = 4, 8, 6


class Attention(nn.Module):
    """Attention over a cache of ``PLACES`` positions: two tensors [b, heads, places, width]. New positions begin at ``at``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (nn.Linear(HEADS * WIDTH, n * HEADS * WIDTH, dtype=torch.float64) for n in (3, 1))

    def forward(self, x: Tensor, at: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, new, _ = x.shape
        q, k, v = self.qkv(x).view(b, new, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        keys, values = (x.new_zeros(b, HEADS, PLACES, WIDTH) for _ in range(2)) if cache is None else cache
        places = at + torch.arange(new)
        keys, values = keys.index_copy(2, places, k), values.index_copy(2, places, v)
        mask = torch.arange(PLACES) <= places[:, None]
        y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, new, -1)), (keys, values)


def steps(layout: str, placements: tuple[Placement, ...], pins: dict[str, str]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, x = Attention(), torch.randn(2, PLACES, HEADS * WIDTH, dtype=torch.float64)
    asked = {"outputs[0]": "R", "outputs[1]": layout, "outputs[2]": layout}
    first = (x[:, :3], torch.tensor(0))
    sharded: Any = fxshard.parallelize(
        copy.deepcopy(model), first, mesh, train=False, compiler="eager", output_layouts=asked, pins=pins, cache=False
    )
    mine = want = None
    with torch.no_grad():
        for at, new in ((0, 3), (3, 1), (4, 1), (5, 1)):
            now = (x[:, at : at + new], torch.tensor(at))
            (out, mine), (other, want) = sharded(*now, mine), model(*now, want)
            whole = out.full_tensor() if isinstance(out, DTensor) else out
            torch.testing.assert_close(whole, other, rtol=1e-9, atol=1e-9)
            for one, full in zip(mine, want, strict=True):
                assert isinstance(one, DTensor) and one.placements == placements and one.to_local().numel() == full.numel() // 2
                torch.testing.assert_close(one.full_tensor(), full, rtol=1e-9, atol=1e-9)
    prefill, decode = sharded.forward.programs[0], sharded.forward.programs[-1]
    assert len(sharded.forward.programs) == 3  # the example call omits the cache; a call that passes None is another one
    assert not any(PLACES in c.shape for c in (*prefill.collectives, *decode.collectives))


def by_heads() -> None:
    steps("S(1)", (Shard(1),), {"out.weight": "S(1)"})


def by_batch() -> None:
    steps("S(0)", (Shard(0),), {})


found, test_two_ranks = two_ranks(by_heads, by_batch)
