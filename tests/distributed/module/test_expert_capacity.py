"""Experts of a fixed capacity on real processes: training steps equal those of one device, which drops the same tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fxshard
from fxshard.runtime.ranks.record import record_collectives
from tests.capacity import ByEinsum, ByIndex, ByScatter
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Loss(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixture(x).square().mean()


def trained(form: type[Any], compiler: str, groups: int = 4) -> None:
    """Tokens and experts are sharded. In groups, tokens travel by all-to-all three times, not four, because x needs no gradient."""
    model = Loss(form(4, 48 if form is ByIndex else 12)).double()
    x = torch.randn(groups, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parallel = {"ep": fxshard.ExpertParallel()}
    fxshard.parallelize(model, (x,), mesh, compiler=compiler, parallel=parallel, objective="communication")
    up = model.get_parameter("mixture.experts.up")
    assert isinstance(up, DTensor) and up.placements == (Shard(0),)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, alone)]
    for _ in range(2):
        with record_collectives() as issued:
            losses = []
            for one, optimizer in zip((model, alone), optimizers, strict=True):
                loss = one(x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
        assert form is ByIndex or sum(c.kind == "all_to_all" for c in issued) == 3
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.allclose(whole, alone.get_parameter(name), rtol=1e-9, atol=1e-12), name


def einsum() -> None:
    trained(ByEinsum, "eager")


def scatter() -> None:
    trained(ByScatter, "eager")


def index() -> None:
    trained(ByIndex, "eager")


def uneven_groups() -> None:
    trained(ByEinsum, "eager", groups=3)


def compiled() -> None:
    trained(ByScatter, "inductor")


found, test_two_ranks = two_ranks(einsum, scatter, index, uneven_groups, compiled)
