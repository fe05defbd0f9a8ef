"""What is known about values of positions equals what torch computes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.passes.trace.rewrites.index_values import Affine, Known, Where, known_values


class Values(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, n: fx.Node) -> object:
        self.values = {**getattr(self, "values", {}), n: super().run_node(n)}
        return self.values[n]


def spelled_out(value: Known, like: Tensor) -> Tensor:
    """The tensor that ``value`` describes, element by element."""
    places = (
        torch.cartesian_prod(*map(torch.arange, like.shape)).view(-1, like.dim()) if like.dim() else torch.zeros(1, 0, dtype=torch.int64)
    )

    def at(one: Affine, place: list[int]) -> float:
        return one.start + sum(step * i for step, i in zip(one.steps, place, strict=True))

    def element(place: list[int]) -> float:
        if isinstance(value, Affine):
            return at(value, place)
        return value.yes if all(at(one, place) >= 0 for one in value.reached) else value.no

    return torch.tensor([element(place) for place in places.tolist()], dtype=like.dtype).view(like.shape)


def check(function: Callable[[], Tensor]) -> Known | None:
    """Compares all that is known in the graph of ``function`` with the values; returns what is known about its result."""
    module = make_fx(function, tracing_mode="fake")()
    found, values = known_values(module.graph), Values(module)
    values.run()
    for node, value in found.items():
        real = values.values[node]
        assert torch.equal(spelled_out(value, real), real), (node, value)
    return found.get(module.graph.output_node().args[0])


def rows(n: int = 5, first: int = 0) -> Tensor:
    return torch.arange(first, first + n)[:, None]


def columns(n: int = 5) -> Tensor:
    return torch.arange(n)[None, :]


def one_sequence() -> Tensor:
    """Where two tokens are of one sequence, as transformers finds it from positions."""
    positions = torch.arange(5)[None].expand(2, -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return sequence[0][rows()] == sequence[0][columns()]


CAUSAL = Where((Affine(0, (1, -1)),), True, False)
EVERYWHERE = Affine(True, (0, 0))
KNOWN: dict[str, tuple[Callable[[], Tensor], Known]] = {
    "less or equal": (lambda: columns() <= rows(), CAUSAL),
    "greater or equal": (lambda: rows() >= columns(), CAUSAL),
    "not greater": (lambda: ~(columns() > rows()), CAUSAL),
    "less than the next": (lambda: columns() < rows() + 1, CAUSAL),
    "tril": (lambda: torch.ones(5, 5, dtype=torch.bool).tril(), CAUSAL),
    "not triu": (lambda: torch.ones(5, 5, dtype=torch.bool).triu(1).logical_not(), CAUSAL),
    "and True": (lambda: (columns() <= rows()) & torch.ones(5, 1, dtype=torch.bool), CAUSAL),
    "slices": (lambda: torch.arange(9)[None, 2:7] <= torch.arange(9)[2:7, None], CAUSAL),
    "indices": (lambda: torch.arange(9)[columns()] <= torch.arange(9)[rows()], CAUSAL),
    "the last query sees all": (lambda: columns() <= rows(1, 4), EVERYWHERE),
    "one sequence": (one_sequence, EVERYWHERE),
    "added, triu": (lambda: torch.full((5, 5), -math.inf).triu(1), Where((Affine(-1, (-1, 1)),), -math.inf, 0)),
    "added, where": (lambda: torch.where(columns() <= rows(), 0.0, -math.inf), Where((Affine(0, (1, -1)),), 0, -math.inf)),
    "added, masked": (
        lambda: torch.zeros(5, 5).masked_fill(columns() > rows(), -math.inf),
        Where((Affine(-1, (-1, 1)),), -math.inf, 0),
    ),
    "a window": (
        lambda: (columns() <= rows()) & (columns() > rows() - 3),
        Where((Affine(0, (1, -1)), Affine(2, (-1, 1))), True, False),
    ),
    "never": (lambda: columns() > rows() + 5, Affine(False, (0, 0))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_masks_are_known(name: str) -> None:
    function, known = KNOWN[name]
    assert check(function) == known


UNKNOWN: dict[str, Callable[[], Tensor]] = {
    "bytes wrap around": lambda: torch.arange(5, dtype=torch.uint8) - 3,
    "negative indices count from the end": lambda: torch.arange(5)[torch.arange(5) - 2],
    "pieces that do not continue": lambda: torch.cat([torch.arange(3), torch.arange(3)]),
    "a piece without elements of other dims": lambda: torch.cat([torch.zeros(0), torch.zeros(5, 5)]),
    "a sum that starts anew": lambda: (torch.arange(5) != 2).cumsum(0),
    "a sum of ones": lambda: torch.ones(5, dtype=torch.int64).cumsum(0),
    "products": lambda: rows() * columns() <= 4,
    "whole and float": lambda: torch.arange(5).float() < 2.5,
    "two conditions turned": lambda: ~((columns() <= rows()) & (columns() > rows() - 3)),
    "random": lambda: torch.rand(5, 5) < 0.5,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_others_are_unknown(name: str) -> None:
    assert check(UNKNOWN[name]) is None


numbers = st.integers(-3, 3)
COMPARISONS = [torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne]


@st.composite
def index(draw: st.DrawFn, shape: tuple[int, int]) -> Tensor:
    """Positions of one or both dims, shifted, sliced, joined or read from others."""
    dim = draw(st.integers(0, 1))
    n, first = shape[dim], draw(numbers)
    kind = draw(st.sampled_from(["plain", "strided", "joined", "read"]))
    if kind == "plain":
        value = torch.arange(n) + first
    elif kind == "strided":
        value = torch.arange(2 * n + 3)[abs(first) : abs(first) + 2 * n - 1 : 2]
    elif kind == "joined":
        value = torch.cat([torch.arange(1) + first, torch.arange(n)])[draw(st.integers(0, 1)) :][:n]
    else:
        value = (torch.arange(n + 6) - first)[torch.arange(n) + draw(st.integers(-2, 3))]
    return value.unsqueeze(1 - dim)


@given(st.data(), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_whatever_is_known_is_true(data: st.DataObject, shape: tuple[int, int]) -> None:
    def mask() -> Tensor:
        total = torch.ones(shape, dtype=torch.bool)
        for _ in range(data.draw(st.integers(1, 3))):
            compare = data.draw(st.sampled_from(COMPARISONS))
            one = compare(data.draw(index(shape)), data.draw(index(shape)) - data.draw(index(shape)) + data.draw(numbers))
            total = total & (~one if data.draw(st.booleans()) else one)
        kind = data.draw(st.sampled_from(["bool", "where", "filled", "tril", "triu"]))
        if kind == "where":
            return torch.where(total, 0.0, -math.inf)
        if kind == "filled":
            return torch.zeros(shape).masked_fill(total, 2.5)
        return total if kind == "bool" else getattr(torch.full(shape, 3), kind)(data.draw(numbers))

    check(mask)
