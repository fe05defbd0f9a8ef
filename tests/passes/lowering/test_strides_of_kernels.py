"""Kernels may give other strides than their fakes: what collectives return in the simulator is dense then too, as from a process group."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.testing import random_plan


class ChannelsLast(nn.Module):
    """In float64 the fake of a convolution of channels_last is contiguous, and its result on the CPU is channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.permute(0, 3, 1, 2)))).flatten(1).sum(1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("axes", "pins"),
    [
        ({"a": 2}, {"first": "S(1)", "tanh": "R"}),  # a gather
        ({"a": 2}, {"first": "S(1)", "tanh": "S(2)"}),  # an all-to-all
        ({"a": 2}, {"tanh": "S(1)", "last": "S(1)"}),
        ({"a": 2, "b": 2}, None),
    ],
    ids=str,
)
def test_results_of_convolutions_that_are_channels_last(axes: dict[str, int], pins: dict[str, str] | None, batch: int) -> None:
    torch.manual_seed(0)
    model, x = ChannelsLast().double(), torch.randn(batch, 8, 8, 4, dtype=torch.float64)
    assert not model.first(x.permute(0, 3, 1, 2)).is_contiguous()
    want, mesh = model(x), fxshard.Mesh(axes)
    want.sum().backward()
    pinned = pins and [fxshard.plan(model, (x,), mesh, pins=pins, cache=False)]
    for plan in pinned or [random_plan(model, (x,), mesh, seed=seed) for seed in range(6)]:
        found = fxshard.simulate(model, (x,), plan)
        torch.testing.assert_close(found.outputs, want, rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
