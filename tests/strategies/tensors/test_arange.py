"""A sharded arange with a fractional start and step has the values of the whole one."""

import pytest
import torch
from torch import nn

import fxshard
from fxshard.testing import assert_equal_to_one_device, one_device


class Positions(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(0.3, 4.3, 0.1, dtype=self.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fractional_steps(dtype: torch.dtype) -> None:
    model, args = Positions(dtype), (torch.zeros(40, dtype=dtype),)
    plan = fxshard.plan(model, args, fxshard.Mesh({"a": 3}), train=False, pins={"arange": "S(0)"})
    assert str(plan.specs["arange"].outputs[0]) == "S(0)"
    result = fxshard.simulate(model, args, plan)
    assert_equal_to_one_device(result, one_device(model, args, train=False), rtol=1e-14 if dtype == torch.float64 else 1e-7)
