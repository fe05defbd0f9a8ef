"""Draws whose bounds or shapes are dynamic sizes: one program for all sizes draws the same numbers as a static one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.passes.trace.trace import trace

DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "high": lambda x: torch.randint(x.shape[0], (5,)),
    "low and high": lambda x: torch.randint(1, x.shape[0], (5,)),
    "size by name": lambda x: torch.randint(2, x.shape[0], size=(x.shape[0],)),
    "all by name": lambda x: torch.randint(low=1, high=x.shape[0], size=(5,)),
    "a size alone": lambda x: torch.rand(x.shape[0]),
}


class Drawing(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(x), x * self.scale


@pytest.mark.parametrize("name", DRAWN)
def test_numbers_equal_those_of_a_static_program(name: str) -> None:
    model, mesh, shapes = Drawing(DRAWN[name]), fxshard.Mesh({"a": 2}), {"x": {0: "n"}}

    def drawn(example: int, size: int, dynamic: bool) -> Tensor:
        args, given = (torch.zeros(example, 4),), {"dynamic_shapes": shapes} if dynamic else {}
        plan = fxshard.plan(model, args, mesh, train=False, cache=False, **given)
        program = fxshard.lower(model, args, plan, **given)
        torch.manual_seed(3)
        found: Tensor = fxshard.simulate(program, (torch.zeros(size, 4),), weights=dict(model.named_parameters())).outputs[0]
        return found

    for size in (4, 10):
        assert torch.equal(drawn(4, size, dynamic=True), drawn(size, size, dynamic=False))


@pytest.mark.parametrize("drop", [torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_])
def test_a_dropout_in_place_that_drops_nothing_leaves_no_node(drop: Callable[..., Tensor]) -> None:
    def operators(function: Callable[[Tensor], Tensor]) -> list[str]:
        graph = trace(Drawing(function), (torch.zeros(4, 4),), train=False)
        return [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]

    assert operators(lambda x: drop(x * 2, 0.5, False)) == operators(lambda x: x * 2)
