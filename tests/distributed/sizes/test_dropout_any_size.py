"""Dropout and layer norm at any batch size and length on two ranks, through Inductor, fully sharded: one device's numbers with the same
mask."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fxshard.ops.random import draw
from fxshard.runtime.module.module import parallelize
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
P = 0.3


class Dropped(nn.Module):
    """[rows, length, 8] to a loss. ``mask`` [rows, length, 12]: which elements are kept; drawn if None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.up(x)).tanh()
        kept = nn.functional.dropout(hidden, P) if mask is None else hidden * mask / (1 - P)
        return self.down(kept).square().mean()


def even_sizes_then_odd_ones() -> None:
    sizes = ((12, 5), (8, 5), (10, 7), (9, 7), (7, 4), (1, 3), (5, 1))
    single = Dropped().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded = parallelize(copy.deepcopy(single), (torch.randn(12, 5, 8).double(),), mesh, parallel={"dp": "fsdp"}, cache=False)
    for rows, length in sizes:
        x = torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(rows)).double()
        torch.manual_seed(rows)
        mask = draw("kept", P, 0, [rows, length, 12], torch.bool, torch.randint(0, 2**62, (), dtype=torch.int64), 0)
        torch.manual_seed(rows)
        loss, want = sharded(x), single(x, mask)
        loss.backward()
        want.backward()
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
        for mine, own in zip(sharded.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), own.grad, rtol=1e-9, atol=1e-9)
            mine.grad = own.grad = None
    assert len(sharded.forward.programs) <= 4


found, test_two_ranks = two_ranks(even_sizes_then_odd_ones)
