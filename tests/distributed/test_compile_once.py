"""Two ranks that compile one graph share the work, and a new process finds what was compiled; the same bits as without."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.runtime import compile
from tests.distributed.ranks import two_ranks

pytestmark = pytest.mark.distributed


def stepped(**options: object) -> list[torch.Tensor]:
    """Loss and gradients of a model that this process has not compiled yet."""
    compile._ARTEFACTS.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(6, 16)
    pins = {"0.weight": "S(0)", "2.weight": "S(1)"}
    sharded = fxshard.parallelize(model, (x,), mesh, pins=pins, **options)
    loss = sharded(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in sharded.parameters())]


def compiled_since(before: dict[str, int]) -> tuple[int, int]:
    """Graphs that both ranks compiled, and those that they took from Inductor's cache."""
    counted = counters["inductor"]
    both = torch.tensor([counted[k] - before.get(k, 0) for k in ("fxgraph_cache_miss", "fxgraph_cache_hit")])
    dist.all_reduce(both)
    return int(both[0]), int(both[1])


def one_compiles_each_half() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.environ |= {"FXSHARD_CACHE": "1", "FXSHARD_CACHE_DIR": f"{folder[0]}/plans", "TORCHINDUCTOR_CACHE_DIR": f"{folder[0]}/inductor"}
    cold, before = stepped(), dict(counters["inductor"])
    assert compiled_since({}) == (2, 2), "a forward and a backward, compiled once; each rank takes the half that it did not compile"
    warm = stepped()
    assert compiled_since(before) == (0, 4)
    os.environ["FXSHARD_CACHE"] = "0"
    before = dict(counters["inductor"])
    without = stepped()
    assert compiled_since(before) == (0, 4), "Inductor's own cache"
    for one, two, three in zip(cold, warm, without, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


found, test_two_ranks = two_ranks(one_compiles_each_half)
