"""Numbers read from tensors: where a model computes with them they stay tensors, of equal dtype and value; elsewhere they are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.graph.planning_graph import depends_on_run_time
from fxshard.mesh.mesh import Mesh
from tests.passes.tracing import Function, check_eager, real, targets

NUMBER = "aten._local_scalar_dense.default"
KEPT_IN_TENSORS: dict[str, Callable[..., Any]] = {
    "quotient": lambda _, x: x / x.detach().abs().max().item(),
    "several steps": lambda _, x: x * (1 - 2.0 / (3 + x.detach().sum().item())),
    "of one element": lambda _, x: x[:1, :1].detach().item() * x,
    "integers": lambda _, x: (x.detach().argmax().item() * 3 - x.shape[0]) + x,
    "quotient of integers": lambda _, x: x * (x.detach().argmax().item() / 7),
    "float of an integer": lambda _, x: x - float(x.detach().argmax()),
    "integer tensor": lambda _, x: (x * 2, x.detach().round().int() + x.detach().argmax().item()),
    "narrow float tensor": lambda _, x: x.float() * x.detach().sum().item(),
    "returned": lambda _, x: (x * 2, x.detach().sum().item() * 2 + 1),
}


@pytest.mark.parametrize("name", KEPT_IN_TENSORS)
def test_numbers_stay_tensors(name: str) -> None:
    graph, result = check_eager(Function(KEPT_IN_TENSORS[name]), real(3, 5), rtol=1e-6 if "narrow" in name else 1e-9, plans=3)
    assert NUMBER not in targets(graph)
    assert not any(depends_on_run_time(node) for node in graph.nodes if node.op == "call_function")
    want = KEPT_IN_TENSORS[name](None, real(3, 5))
    for mine, theirs in zip(*(torch.utils._pytree.tree_leaves(x) for x in (result.outputs, want)), strict=True):
        assert type(mine) is type(theirs)
        assert getattr(mine, "dtype", None) == getattr(theirs, "dtype", None)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-12)


NUMBERS: dict[str, Callable[..., Any]] = {
    "with another dtype": lambda _, x: (x * 2, x.detach().round().int() * x.detach().sum().item()),
    "a comparison": lambda _, x: (x * 2, x.detach().round().int() > x.detach().sum().item()),
    "a size": lambda _, x: (x * 2, torch.zeros(x.detach().abs().argmax().item()).sum()),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_other_numbers_are_read(name: str) -> None:
    graph, result = check_eager(Function(NUMBERS[name]), real(3, 5), plans=2)
    assert NUMBER in targets(graph)
    assert result.outputs[1].dtype == NUMBERS[name](None, real(3, 5))[1].dtype


def test_a_product_of_integers_does_not_overflow() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = x.sum().item()
            return x.double() * ((n * n) / 1)

    x = torch.tensor([2**31, 2**30])
    got = fxshard.simulate(Square(), (x,), mesh=Mesh({"tp": 2})).outputs
    torch.testing.assert_close(got, Square()(x), rtol=1e-12, atol=0)
