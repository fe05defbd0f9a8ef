"""Buffers that a forward assigns: the program returns their new values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.errors import TraceError
from fxshard.mesh.mesh import Mesh

X = torch.randn(4, 4, dtype=torch.float64)


class Counts(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4, dtype=torch.float64), forward
        self.register_buffer("n", torch.ones(4, dtype=torch.float64))
        self.register_buffer("unset", None)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def twice(self: Any, x: Tensor) -> Any:
    before = self.n
    self.n = self.n + 1
    self.n = self.n * 2
    return self.layer(x) + self.n, before


def of_a_gradient(self: Any, x: Tensor) -> Any:
    self.n = self.layer(x).mean(0)
    return self.layer(x) * self.n


def only_written(self: Any, x: Tensor) -> Any:
    self.n = x.mean(0)
    return self.layer(x)


@pytest.mark.parametrize("body", [twice, of_a_gradient, only_written])
def test_values_and_gradients_are_those_of_one_device(body: Callable[..., Any]) -> None:
    model = Counts(body)
    reference = copy.deepcopy(model)
    plan = fxshard.plan(model, (X,), Mesh({"a": 2}), input_layouts="S(0)")
    result = fxshard.simulate(model, (X,), plan)
    want = reference(X)
    assert set(result.mutations) == {"n"}
    torch.testing.assert_close(result.mutations["n"], reference.n.detach(), rtol=1e-9, atol=0)
    outputs = want if isinstance(want, tuple) else (want,)
    found = result.outputs if isinstance(result.outputs, tuple) else (result.outputs,)
    for have, value in zip(found, outputs, strict=True):
        torch.testing.assert_close(have, value.detach(), rtol=1e-9, atol=1e-12)
    outputs[0].sum().backward()
    torch.testing.assert_close(result.grads["layer.weight"], reference.layer.weight.grad, rtol=1e-9, atol=1e-12)


REFUSED: dict[str, tuple[str, Any]] = {
    r"buffer n \(\(4,\), torch.float64\) is assigned a tensor of another kind": ("n", lambda x: x.mean()),
    r"buffer unset \(None\) is assigned": ("unset", lambda x: x.mean(0)),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_tensor_of_another_kind_is_refused(said: str) -> None:
    name, value = REFUSED[said]

    def body(self: Any, x: Tensor) -> Tensor:
        setattr(self, name, value(x))
        return self.layer(x)

    with pytest.raises(TraceError, match=said) as caught:
        fxshard.plan(Counts(body), (X,), Mesh({"a": 2}))
    assert "test_assigned.py" in str(caught.value.where) and caught.value.remedy
