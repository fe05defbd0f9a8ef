"""``as_strided`` in a model reads and writes the right elements, on shards too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import TraceError
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.trace.trace import trace
from fxshard.testing import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

Function = Callable[[torch.Tensor], torch.Tensor]


class Strided(nn.Module):
    """Applies each function to a trained matrix [4, 6] of its own."""

    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(functions), 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
        self.functions = functions

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(f(w * x).sin() for f, w in zip(self.functions, self.weight, strict=True))


def overwritten(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z.as_strided((4,), (7,)).mul_(3)
    return z


CASES: dict[str, Function] = {
    "another shape": lambda y: y.as_strided((2, 12), (12, 1)),
    "transposed": lambda y: y.as_strided((6, 4), (1, 6)),
    "of a transpose": lambda y: (y.t() * 2).as_strided((4, 6), (6, 1)),
    "dims of size 1": lambda y: y.as_strided((4, 1, 6, 1), (6, 3, 1, 24)),
    "overlapping windows": lambda y: y.as_strided((4, 4, 3), (6, 1, 1)),
    "a diagonal": lambda y: y.as_strided((4,), (7,)),
    "behind an offset": lambda y: y.as_strided((3, 5), (7, 1), 2),
    "repeated": lambda y: y.as_strided((3, 6), (0, 1)),
    "the offset of a view": lambda y: y[1:].as_strided((2, 6), (6, 1)),
    "beyond a view": lambda y: y[2:, 1:].as_strided((4, 6), (6, 1), 0),
    "written whole": lambda y: torch.as_strided_scatter(y, y.t() * 2, (6, 4), (4, 1)),
    "written in part": lambda y: torch.as_strided_scatter(y, y[0, :4] * 2, (4,), (7,), 1),
    "written in place": overwritten,
}


def test_values_and_gradients_equal_one_device() -> None:
    model, x = Strided(*CASES.values()), torch.arange(24, dtype=torch.float64).view(4, 6) / 24
    graph = trace(model, (x,))
    assert not any("as_strided" in str(n.target) for n in graph.nodes)
    plan = random_graph_plan(annotate(graph, fxshard.Mesh({"a": 2})), 0)
    assert_equal_to_one_device(fxshard.simulate(model, (x,), plan), one_device(model, (x,)))


@pytest.mark.parametrize("name", ["another shape", "transposed", "of a transpose", "dims of size 1"])
def test_strides_that_fill_the_memory_need_no_index(name: str) -> None:
    """They are reshapes and permutations, which are free."""
    graph = trace(Strided(CASES[name]), (torch.ones(4, 6, dtype=torch.float64),), train=False)
    assert not any("index" in str(n.target) for n in graph.nodes)


def test_memory_that_no_element_of_an_input_covers_is_refused() -> None:
    every_second = torch.ones(4, 12, dtype=torch.float64)[:, ::2]

    class Reaching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.as_strided((4, 12), (12, 1)) * 2

    with pytest.raises(TraceError, match="memory that no value") as caught:
        trace(Reaching(), (every_second,))
    assert "as_strided((4, 12), (12, 1))" in str(caught.value)
