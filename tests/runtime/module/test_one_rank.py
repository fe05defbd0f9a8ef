"""A parallelized module on one rank, where all placements mean the same."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import fxshard


@torch.no_grad()
def test_results_are_dtensors_where_they_are_on_several_ranks(mesh: DeviceMesh) -> None:
    """A plain argument gives a plain result, whatever layout is asked for, and a DTensor one in that layout. A parameter may be pending."""
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Partial()]))
    want = nn.functional.linear(x, model.weight.to_local(), model.bias)
    sharded = fxshard.parallelize(model, (x,), mesh, train=False, compiler="eager", cache=False, output_layouts="S(0)")
    out, placed = sharded(x), sharded(distribute_tensor(x, mesh, [Shard(1)]))
    assert type(out) is torch.Tensor and isinstance(placed, DTensor) and placed.placements == (Shard(0),)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(placed.to_local(), want)
