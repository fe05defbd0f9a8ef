"""One rank of 64 in a fake group: uneven sizes take one more program, and the rank computes its own rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxshard.runtime.module.module import parallelize

RANKS = 64


class Counted(nn.Module):
    """Scales each row by its global index."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * torch.arange(x.shape[0], dtype=x.dtype)[:, None]


@pytest.fixture(params=[32, 63])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def test_three_programs_for_any_lengths(mesh: DeviceMesh) -> None:
    model = Counted().double()
    single, rank = copy.deepcopy(model), dist.get_rank()

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(count))

    def own(whole: torch.Tensor) -> torch.Tensor:
        each = -(-len(whole) // RANKS)
        return whole[rank * each : (rank + 1) * each]

    def cut(whole: torch.Tensor) -> DTensor:
        return DTensor.from_local(own(whole), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    sharded = parallelize(model, (cut(rows(128)),), mesh, compiler="eager", cache=False, output_layouts="S(0)")
    for count, programs in ((128, 1), (192, 2), (65, 3), (7, 3), (1, 3), (63, 3), (129, 3), (320, 3)):
        out = sharded(cut(rows(count)))
        torch.testing.assert_close(out.to_local(), own(single(rows(count))), rtol=1e-9, atol=1e-12)
        out.to_local().sum().backward()
        assert len(sharded.forward.programs) == programs, count  # type: ignore[union-attr]
