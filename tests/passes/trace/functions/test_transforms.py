"""Transforms of ``torch.func`` in a forward are part of the graph; an error within one leaves none active."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import TraceError
from fxshard.testing import random_plan


class Transformed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.weight = kind, nn.Linear(8, 8), nn.Parameter(torch.randn(8, 6))

    def energy(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() @ self.weight).square().sum()

    def forward(self, x: Tensor) -> Any:
        if self.kind == "grad":
            return torch.func.grad(self.energy)(x)
        if self.kind == "jvp":
            return torch.func.jvp(self.layer, (x,), (x * 2,))[1]
        if self.kind == "jacrev":
            return torch.func.jacrev(lambda z: self.layer(z).tanh().sum(0))(x)
        if self.kind == "vmap":
            return torch.func.vmap(self.energy)(x)
        if self.kind == "parameters":
            stacked = {name: torch.stack([p, p * 2]) for name, p in self.layer.named_parameters()}
            return torch.func.vmap(lambda p: torch.func.functional_call(self.layer, p, (x,)))(stacked)
        return torch.func.vmap(torch.func.hessian(self.energy))(x)


@pytest.mark.parametrize("kind", ["grad", "jvp", "jacrev", "vmap", "parameters"])
def test_transforms_are_planned_and_differentiated(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Transformed(kind).double(), torch.randn(5, 8, dtype=torch.float64)
    want, mesh = model(x), fxshard.Mesh({"a": 2})
    wanted = torch.autograd.grad(want.sum(), list(model.parameters()), allow_unused=True)
    for plan in (fxshard.plan(model, (x,), mesh, cache=False), random_plan(model, (x,), mesh, seed=0)):
        found = fxshard.simulate(model, (x,), plan)
        torch.testing.assert_close(found.outputs, want, rtol=1e-9, atol=1e-12)
        for (name, p), gradient in zip(model.named_parameters(), wanted, strict=True):
            mine = found.grads.get(name, torch.zeros_like(p))
            torch.testing.assert_close(mine, torch.zeros_like(p) if gradient is None else gradient, rtol=1e-9, atol=1e-12)


def test_an_error_within_a_transform_leaves_none_active() -> None:
    model, x = Transformed("hessian"), torch.randn(4, 8)
    with pytest.raises(TraceError):
        fxshard.plan(model, (x,), fxshard.Mesh({"a": 2}), cache=False)
    model.energy(torch.randn(4, 8)).backward()  # torch refuses both calls within a transform
    assert model.weight.grad is not None


class Force(Transformed):
    def forward(self, x: Tensor) -> Any:
        return torch.autograd.grad(self.energy(x), self.weight, create_graph=True)[0]


def test_a_gradient_by_autograd_is_refused_with_what_to_do() -> None:
    with pytest.raises(TraceError, match=r"(?s)where: .*test_transforms.py.*autograd.grad.*take the gradient by torch.func.grad"):
        fxshard.plan(Force("force"), (torch.randn(4, 8),), fxshard.Mesh({"a": 2}), cache=False)
