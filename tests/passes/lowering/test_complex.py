"""Complex values: gradients of products are conjugated, and collectives take their real and imaginary parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.testing import random_plan


class Products(nn.Module):
    """Every product that becomes an einsum, and a conjugate that moves."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"dtype": torch.complex128}
        self.linear, self.batched = nn.Linear(6, 5, **kinds), nn.Parameter(torch.randn(3, 5, 4, **kinds))
        self.table, self.vector = nn.Parameter(torch.randn(4, 6, **kinds)), nn.Parameter(torch.randn(6, **kinds))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("rbi,rij->rbj", self.linear(x), self.batched)  # [3, 5, 4]
        z = (y @ self.table).conj() * torch.fft.fft(x)
        return torch.stack([(z @ self.vector).abs().sum(1), z.mH.sum((1, 2)).real, torch.addmm(x[0], y[0], self.table).angle().sum(1)[:3]])


@pytest.fixture(scope="module")
def trained() -> tuple[Products, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = Products(), torch.randn(3, 5, 6, dtype=torch.complex128)
    want = model(x)
    want.sum().backward()
    return model, x, want


@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_any_plan_gives_the_gradients_of_one_device(trained: tuple[Products, Tensor, Tensor], axes: dict[str, int]) -> None:
    model, x, want = trained
    mesh = fxshard.Mesh(axes)
    plans = [fxshard.plan(model, (x,), mesh, cache=False), *(random_plan(model, (x,), mesh, seed=seed) for seed in range(4))]
    assert {c.kind for plan in plans for c in plan.collectives} >= {"all_reduce", "all_gather", "all_to_all"}
    for plan in plans:
        found = fxshard.simulate(model, (x,), plan)
        torch.testing.assert_close(found.outputs, want, rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
