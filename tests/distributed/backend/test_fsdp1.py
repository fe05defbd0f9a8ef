"""The backend within FSDP1 (``FullyShardedDataParallel``), on two ranks, and around tensor parallelism on four: two steps, as in eager
execution. ``plan`` and ``parallelize`` refuse such a model by name."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from fxshard.errors import OptionError
from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.distributed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.down(self.up(input).relu())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, input: Tensor) -> Tensor:
        return self.second(self.first(input)).tanh()


def wrapped(model: nn.Module, tensor: int) -> nn.Module:
    """The model within FSDP1, layer by layer and as a whole, on two ranks, with tensor parallelism on ``tensor`` ranks within it."""
    mesh = init_device_mesh("cpu", (2, tensor), mesh_dim_names=("dp", "tp"))
    for name in ("first", "second"):
        layer = getattr(model, name)
        if tensor > 1:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        setattr(model, name, fsdp(layer, mesh["dp"]))
    return fsdp(model, mesh["dp"])


def fsdp(module: nn.Module, mesh: object) -> nn.Module:
    return FullyShardedDataParallel(module, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))


def same(tensor: int) -> None:
    model = Layers().double()
    eager, have = wrapped(copy.deepcopy(model), tensor), wrapped(model, tensor)
    compiled = torch.compile(have, backend="fxshard", options={"compiler": "eager", "timeout": 60.0})
    x = torch.randn(4, 6, dtype=torch.float64)
    steps = [torch.optim.SGD(one.parameters(), 0.1) for one in (eager, have)]
    for _ in range(2):
        results = [one(x) for one in (eager, compiled)]
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
        for result, step in zip(results, steps, strict=True):
            step.zero_grad()
            result.square().sum().backward()
            step.step()
        for p, q in zip(eager.parameters(), have.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-9)
    for refused in (fxshard.plan, fxshard.parallelize):
        with pytest.raises(OptionError, match="wrapped by FSDP or DDP"):
            refused(have, (x,), init_device_mesh("cpu", (2 * tensor,), mesh_dim_names=("world",)))


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_steps(tensor: int, tmp_path: Path) -> None:
    (said,) = run_scenarios({"same": partial(same, tensor)}, 2 * tensor, tmp_path).values()
    assert not said, said
