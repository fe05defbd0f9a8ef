"""Models with dynamic dims, for the tests of symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from examples.llama import Llama
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.trace.trace import trace
from fxshard.shapes import dynamic_dims

BATCH, BOTH = {0: "batch"}, {0: "batch", 1: "seq"}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).softmax(-1).square()


class LinearThen(nn.Module):
    """A linear layer [3 -> 4] in float64, then ``function``."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.function = nn.Linear(3, 4).double(), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x))


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


class Flattened(nn.Module):
    """Flattens batch and length to one dim. On two mesh axes, shards of unequal lengths are sharded again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x.flatten(0, 1))).unflatten(0, (x.shape[0], x.shape[1]))


def boxes(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, seq, 8, dtype=torch.float64),)


def perceptron(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 8, dtype=torch.float64),)


def tokens(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 64, (batch, seq)), torch.randint(0, 64, (batch, seq))


CASES: dict[str, tuple[Any, Any, Any]] = {
    "perceptron": (lambda: Perceptron().double(), perceptron, (BATCH,)),
    "flattened": (lambda: Flattened().double(), boxes, (BOTH,)),
    "llama": (lambda: Llama.small().double(), tokens, (BOTH, BOTH)),
    "one layer": (lambda: Llama.small(layers=1).double(), tokens, (BOTH, BOTH)),
}
"""Name -> (model, arguments for a batch and a length, dynamic dims)."""


@lru_cache(maxsize=4)
def traced(name: str, batch: int, seq: int, *, dynamic: bool = True, uneven: bool = False) -> tuple[nn.Module, PlanningGraph]:
    """The model and its graph. They are cached: a test must not change them."""
    model, arguments, dims = CASES[name]
    torch.manual_seed(0)
    made, args = model(), arguments(batch, seq)
    found = tuple(replace(d, uneven=uneven) for d in dynamic_dims(made, args, {}, dims)) if dynamic else ()
    return made, trace(made, args, dynamic=found)


def calls(graph: fx.Graph) -> list[Any]:
    """A graph without names: for each node its operator, its arguments with positions in place of nodes, and the shape of its value."""
    place = {node: i for i, node in enumerate(graph.nodes)}

    def said(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{place[value]}"
        if isinstance(value, (list, tuple)):
            return [said(v) for v in value]
        return repr(value)

    def target(node: fx.Node) -> str:  # torch calls the view of a fresh copy _unsafe_view
        return str(node.target).replace("_unsafe_view", "view") if node.op == "call_function" else node.op

    return [(target(n), said(n.args), _shapes(n.meta.get("val"))) for n in graph.nodes]


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return [_shapes(v) for v in value] if isinstance(value, Sequence) else None
