"""The state of one device's optimiser, loaded into that of a parallelized model by torch's own call, on two gloo ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from tests.distributed.scenarios import cases_on_ranks

pytestmark = pytest.mark.distributed


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded(word: str, make: Any) -> None:
    """Two steps on one device, and two more on the ranks."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    x, own = torch.randn(4, 6, dtype=torch.float64), make(reference.parameters())
    for _ in range(2):
        step(reference, own, x)
    model, mesh = copy.deepcopy(reference), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fxshard.parallelize(model, (x,), mesh, compiler="eager", parallel={"dp": word}, timeout=60.0)
    optimizer = make(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    for state, parameter in zip(optimizer.state.values(), model.parameters(), strict=True):
        assert all(x.placements == parameter.placements for x in state.values() if isinstance(x, DTensor))
    for _ in range(2):
        step(reference, own, x)
        step(model, optimizer, x)
    for (name, have), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(have.full_tensor(), want, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


MAKERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
}
found, test_two_ranks = cases_on_ranks(
    2, {f"{w} {n}": partial(loaded, w, make) for w in ("fsdp", "tp", "ddp") for n, make in MAKERS.items()}
)
