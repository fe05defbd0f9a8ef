"""The backend with tensors whose names a graph may not use: those of built-in functions, and names that are not ASCII."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.runtime.backend.test_backend import sharded


class Reserved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.größe, self.id = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.register_buffer("len", torch.randn(4))

    def forward(self, input: Tensor, type: Tensor, input_1: Tensor) -> Tensor:
        return torch.relu(self.größe(input) * self.id + self.len) * type + input_1


def test_names_that_a_graph_may_not_use() -> None:
    torch._dynamo.reset()
    model = Reserved().double()
    reference = copy.deepcopy(model)
    inputs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    for made in (have := sharded(model)(*inputs), want := reference(*inputs)):
        made.square().sum().backward()
    torch.testing.assert_close(have, want)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
