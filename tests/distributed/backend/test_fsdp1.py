"""The backend within FSDP1 (``FullyShardedDataParallel``), alone and around tensor parallelism: two ranks, as in eager
execution; ``plan`` and ``parallelize`` refuse such a model by name."""

from __future__ import annotations

import copy
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


def wrapped(model: nn.Module, data: int) -> nn.Module:
    """The model within FSDP1, layer by layer and as a whole, on ``data`` ranks, with tensor parallelism on the others."""
    mesh = init_device_mesh("cpu", (data, 2 // data), mesh_dim_names=("dp", "tp"))
    for name in ("first", "second"):
        layer = getattr(model, name)
        if data == 1:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        setattr(model, name, fsdp(layer, mesh["dp"]))
    return fsdp(model, mesh["dp"])


def fsdp(module: nn.Module, mesh: object) -> nn.Module:
    return FullyShardedDataParallel(module, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))


def same(data: int) -> None:
    model = Layers().double()
    eager, have = wrapped(copy.deepcopy(model), data), wrapped(model, data)
    compiled = torch.compile(have, backend="fxshard", options={"compiler": "eager", "timeout": 60.0})
    x = torch.randn(4, 6, dtype=torch.float64)
    steps = [torch.optim.SGD(one.parameters(), 0.1) for one in (eager, have)]
    for _ in range(data):  # torch's FSDP1 on one rank around DTensors fails in its second step, without a backend too
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
            refused(have, (x,), init_device_mesh("cpu", (2,), mesh_dim_names=("world",)))


def alone() -> None:
    same(2)


def around_tensor_parallelism() -> None:
    same(1)


def test_two_ranks(tmp_path: Path) -> None:
    found = run_scenarios({"alone": alone, "around_tensor_parallelism": around_tensor_parallelism}, 2, tmp_path)
    assert not any(found.values()), found
