"""The simulator's gloo order against real gloo: all-reduce and reduce-scatter bit for bit, and a model in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.mesh.mesh import Mesh
from fxshard.runtime.groups.reduce_scatter import reduce_scatter
from fxshard.runtime.simulate.reductions import reduce_tensors, scatter_tensors
from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.distributed

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (1, 2, 3, 7, 48, 1000, 1001, 600_000, 4_000_003)
"""The last one has more than two segments per chunk on up to four ranks, in float32 and float64."""


def held(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size % 97)).to(dtype)


def sums() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    in_rank_order = 0
    for dtype in DTYPES:
        for size in SIZES:
            tensors = [held(r, size, dtype) for r in range(world)]
            want = reduce_tensors(tensors, "sum", "gloo")
            mine = tensors[rank].clone()
            dist.all_reduce(mine)
            assert torch.equal(mine, want), (dtype, size)
            in_rank_order += torch.equal(mine, reduce_tensors(tensors, "sum"))
            if size % world == 0:
                part = reduce_scatter(tensors[rank], "sum", world, dist.group.WORLD.group_name, "gloo")
                assert torch.equal(part, scatter_tensors(tensors, "sum", "gloo")[rank]), (dtype, size)
                exact = torch.stack(tensors).double().chunk(world, 1)[rank]
                rounded = torch.finfo(dtype).eps * float(exact.abs().sum(0).max())
                torch.testing.assert_close(part.double(), exact.sum(0), rtol=0, atol=rounded)
    assert world == 2 or in_rank_order < len(DTYPES) * len(SIZES), "these values do not tell gloo's order from the order of ranks"


def a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 48, bias=False), nn.Tanh(), nn.Linear(48, 96, bias=False)).bfloat16()
    x = torch.randn(5, 96).bfloat16()
    mesh = Mesh({"tp": dist.get_world_size()})
    pins = {"0.weight": "S(0)", "2.weight": "S(1)", "2": "P"}
    plan = fxshard.plan(model, (x,), mesh, train=False, pins=pins, input_layouts="R", output_layouts="R")
    results = {order: fxshard.simulate(model, (x,), plan, reduction=order).outputs for order in ("exact", "gloo")}
    assert not torch.equal(results["exact"], results["gloo"])
    device_mesh = init_device_mesh("cpu", (mesh.size,), mesh_dim_names=("tp",))
    with torch.no_grad():
        assert torch.equal(fxshard.parallelize(model, (x,), device_mesh, plan, compiler="eager")(x), results["gloo"])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gloo(world: int, tmp_path: Path) -> None:
    scenarios = {"sums": sums, "a_model": a_model} if world == 3 else {"sums": sums}
    said = run_scenarios(scenarios, world, tmp_path)
    assert not any(said.values()), said
