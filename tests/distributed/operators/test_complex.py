"""Complex values on two gloo ranks: each kind of collective, forward and backward, as on one device."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.runtime.ranks.record import record_collectives
from tests.distributed.scenarios import cases_on_ranks

pytestmark = pytest.mark.distributed


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.conj() @ self.weight).abs().square().sum()


def same(weight: str, rows: str) -> None:
    torch.manual_seed(0)
    reference, x = Product(), torch.randn(5, 8, dtype=torch.complex128)
    model, mesh = copy.deepcopy(reference), init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    pinned = {"pins": {"weight": weight}, "input_layouts": {"args[0]": rows}}
    fxshard.parallelize(model, (x,), mesh, compiler="eager", timeout=60.0, **pinned)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, reference)]
    for _ in range(2):
        with record_collectives() as issued:
            losses = [m(x) for m in (model, reference)]
            for loss in losses:
                loss.backward()
        torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-12)
        assert all(not c.dtype.startswith("torch.complex") for c in issued)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(model.weight, DTensor)
    torch.testing.assert_close(model.weight.full_tensor(), reference.weight, rtol=1e-9, atol=1e-12)


LAYOUTS = [(weight, rows) for weight in ("R", "S(0)", "S(1)") for rows in ("R", "S(0)", "S(1)")]
found, test_two_ranks = cases_on_ranks(2, {f"{weight} {rows}": partial(same, weight, rows) for weight, rows in LAYOUTS})
