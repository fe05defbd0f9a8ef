"""A loss that uses some of a model's outputs: parameters behind the others have no gradient, as on one device, so that the optimiser leaves
them alone. Two gloo ranks against one device, float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class TwoHeads(nn.Module):
    """``lone`` is behind one output, ``trunk`` behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.lone = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x).relu()
        return {"head": self.head(h), "lone": self.lone(h), "free": x * 2}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(make: Any) -> None:
    """Four steps of AdamW, in which the tasks take turns: decay and momentum would move a parameter with a gradient of zeros."""
    torch.manual_seed(0)
    reference, x = TwoHeads().double(), torch.randn(6, 8, dtype=torch.float64)
    model = copy.deepcopy(reference)
    call = make(model, x)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.1) for one in (model, reference)]
    for task in ("head", "lone", "head", "lone"):
        for one, optimizer in zip((call, reference), optimizers, strict=True):
            optimizer.zero_grad()
            one(x)[task].square().mean().backward()
            optimizer.step()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (task, name)
            torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-9, atol=1e-9)


def by_parallelize() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    trained(lambda model, x: fxshard.parallelize(model, (x,), mesh, compiler="eager", parallel={"dp": "ddp"}, timeout=60.0))


def by_backend() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    trained(lambda model, x: torch.compile(model, backend="fxshard", options={"mesh": mesh, "compiler": "eager", "timeout": 60.0}))


found, test_two_ranks = two_ranks(by_parallelize, by_backend)
