"""Compiled autograd around the backend's programs: gradients and hooks as on one device, and nothing of the backward is planned again."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.backend.test_backend import sharded


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up = nn.Parameter(torch.rand(4)), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x * self.scale).tanh()


def gradients(model: nn.Module, forward: nn.Module, x: Tensor) -> list[Tensor]:
    """Those of a loss whose graph continues on both sides of the module, with a hook on a parameter's gradient; twice, so that they add."""
    model.scale.register_hook(lambda gradient: gradient * 3)
    for _ in range(2):
        (forward(x.sin()) ** 2).mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def test_gradients(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = Scaled().double()
    reference = copy.deepcopy(model)
    x, y = (torch.ones(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    want = gradients(reference, reference, y)
    with caplog.at_level(logging.INFO, "fxshard"), torch._dynamo.compiled_autograd._enable(sharded):
        have = gradients(model, sharded(model), x)
    torch.testing.assert_close(have, want)
    assert sum("nodes on" in message for message in caplog.messages) == 1
    assert any("compiled autograd" in message for message in caplog.messages)
