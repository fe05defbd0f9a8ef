"""Two ranks share the compilation of a graph, and a new process finds the compiled code; the cache changes no bit of the results."""

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
from fxshard.runtime.compile import compile
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


def stepped(rows: tuple[int, ...] = (6,), **options: object) -> list[torch.Tensor]:
    """The loss at each number of rows, and the gradients of their sum, of a model that this process has not compiled yet."""
    compile._ARTEFACTS.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    batches = [torch.randn(size, 16) for size in rows]
    pins = {"0.weight": "S(0)", "2.weight": "S(1)"}
    sharded = fxshard.parallelize(model, (batches[0],), mesh, pins=pins, **options)
    losses = [sharded(x).square().sum() for x in batches]
    sum(losses).backward()
    return [*(loss.detach() for loss in losses), *(p.grad.full_tensor() for p in sharded.parameters())]


def compiled_since(before: dict[str, int]) -> tuple[int, int]:
    """How many graphs the two ranks compiled since ``before``, and how many they took from Inductor's cache."""
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


def a_restart_finds_code_for_any_size() -> None:
    """A program with symbolic sizes: a second process takes both halves from the cache, and calls Inductor for no size."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.environ |= {"FXSHARD_CACHE": "1", "FXSHARD_CACHE_DIR": f"{folder[0]}/plans", "TORCHINDUCTOR_CACHE_DIR": f"{folder[0]}/inductor"}
    before = dict(counters["inductor"])
    cold = stepped(rows=(6, 10), dynamic_shapes=({0: "batch"},))
    assert compiled_since(before) == (2, 2)
    before, both = dict(counters["inductor"]), compile._compile_halves
    compile._compile_halves = None
    try:
        warm = stepped(rows=(6, 10), dynamic_shapes=({0: "batch"},))
    finally:
        compile._compile_halves = both
    assert compiled_since(before) == (0, 4)
    assert all(map(torch.equal, cold, warm))


found, test_two_ranks = two_ranks(one_compiles_each_half, a_restart_finds_code_for_any_size)
