"""The deviation of one row is nan, as on one device. A division by zero in the model's own code is refused with its line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fxshard
from fxshard.errors import SizesError
from tests.passes.any_size import LinearThen, rows

MESH = fxshard.Mesh({"dp": 2})


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("example", [4, 1])
@pytest.mark.parametrize("function", [lambda y: y.std(0), lambda y: y.var(0)], ids=["std", "var"])
def test_a_deviation_of_one_row(function: Callable[[Tensor], Tensor], example: int) -> None:
    model = LinearThen(function)
    plan = fxshard.plan(model, (rows(example),), MESH, dynamic_shapes=({0: "n"},))
    for count in (1, 2, 5):
        found = fxshard.simulate(model, (rows(count),), plan)
        model.zero_grad()
        want = model(rows(count))
        want.sum().backward()
        torch.testing.assert_close(found.outputs, want, rtol=1e-9, atol=1e-9, equal_nan=True)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found.grads[name], parameter.grad, rtol=1e-9, atol=1e-9, equal_nan=True)
        assert found.outputs.isnan().all() == (count == 1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda y: y * (1 / (y.shape[0] - 1)), r"has no value at n=1: .*[\s\S]*zero\.py"),
        (lambda y: y * (2.0 / (y.shape[0] - 1)), r"n - 1 != 0 .*zero\.py"),
    ],
    ids=["integers", "floats"],
)
def test_a_division_in_the_models_code(function: Callable[[Tensor], Tensor], said: str) -> None:
    model = LinearThen(function)
    plan = fxshard.plan(model, (rows(4),), MESH, dynamic_shapes=({0: "n"},))
    torch.testing.assert_close(fxshard.simulate(model, (rows(3),), plan).outputs, model(rows(3)))
    with pytest.raises(ZeroDivisionError):
        model(rows(1))
    with pytest.raises(SizesError, match=said):
        fxshard.simulate(model, (rows(1),), plan)
