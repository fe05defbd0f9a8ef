"""Operators whose C++ kernels read sizes as numbers keep a dim dynamic, because their Python kernels accept symbols."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from fxshard.errors import StaticDimError

MESH = fxshard.Mesh({"a": 2})
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x, (0, 1), value=2.0),
    "pad in front": lambda x: F.pad(x, (0, 0, 1, 0)),
    "pad off": lambda x: F.pad(x, (0, -1)),
    "pad and cut": lambda x: F.pad(x, (0, 0, 0, 3))[: x.shape[0]],
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "interpolate": lambda x: F.interpolate(x.unsqueeze(1), scale_factor=2),
    "prod": lambda x: x.prod(0),
    "half": lambda x: x[: x.shape[0] // 2 + 1],
}


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_plan_at_other_sizes(name: str) -> None:
    model = Applied(FUNCTIONS[name])
    x = torch.randn(6, 8, dtype=torch.float64)
    shapes = {"x": {0: "rows"}}
    plan = fxshard.plan(model, (x,), MESH, dynamic_shapes=shapes, train=False, cache=False)
    program = fxshard.lower(model, (x,), plan, dynamic_shapes=shapes)
    for rows in (2, 10, 12):
        other = torch.randn(rows, 8, dtype=torch.float64)
        found = fxshard.simulate(program, (other,), weights=dict(model.named_parameters())).outputs
        torch.testing.assert_close(found, model(other).detach(), rtol=1e-9, atol=1e-12)


def test_the_error_names_the_line_that_fixes_a_dim() -> None:
    model = Applied(lambda x: x * torch.linspace(0, 1, x.shape[0], dtype=x.dtype)[:, None] if x.shape[0] > 1 else x)
    with pytest.raises(StaticDimError, match=r"takes for granted that rows == 6 .*test_dims_stay_dynamic.py"):
        fxshard.plan(model, (torch.randn(6, 8, dtype=torch.float64),), MESH, dynamic_shapes={"x": {0: "rows"}}, train=False)
