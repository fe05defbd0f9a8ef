"""What is known about values of positions equals what torch computes, bit for bit and in kind."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.passes.trace.rewrites.index_values import Affine, Known, Where
from fxshard.passes.trace.rewrites.known_values import known_values


class Values(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> object:
        self.values[n] = super().run_node(n)
        return self.values[n]


def spelled_out(value: Known, like: Tensor) -> list[Any]:
    """The elements that ``value`` describes, in order."""
    places = torch.cartesian_prod(*map(torch.arange, like.shape)).view(-1, like.dim()).tolist() if like.dim() else [[]]

    def at(one: Affine, place: list[int]) -> int:
        return one.start + sum(step * i for step, i in zip(one.steps, place, strict=True))

    def element(place: list[int]) -> Any:
        if isinstance(value, Affine):
            return at(value, place)
        return value.yes if all(at(one, place) >= 0 for one in value.reached) else value.no

    return [element(place) for place in places]


def check(function: Callable[[], Tensor]) -> Known | None:
    """Compares all that is known in the graph of ``function`` with the values; returns what is known about its result."""
    return compared(make_fx(function, tracing_mode="fake")())


def compared(module: fx.GraphModule) -> Known | None:
    found, values = known_values(n for n in module.graph.nodes if n.op == "call_function"), Values(module)
    values.run()
    for node, value in found.items():
        have, want = spelled_out(value, values.values[node]), values.values[node].flatten().tolist()
        assert have == want and list(map(type, have)) == list(map(type, want)), (node, value)
    return found.get(module.graph.output_node().args[0])


def rows(n: int = 5, first: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(first, first + n, dtype=dtype)[:, None]


def columns(n: int = 5, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(n, dtype=dtype)[None, :]


def ones(dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(5, 5, dtype=dtype)


def one_sequence() -> Tensor:
    """Where two tokens are of one sequence, as transformers finds it from positions."""
    positions = torch.arange(5)[None].expand(2, -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return sequence[0][rows()] == sequence[0][columns()]


BELOW = (Affine(0, (1, -1)),)
CAUSAL, ABOVE = Where(BELOW, True, False), Where((Affine(-1, (-1, 1)),), True, False)
EVERYWHERE, NOWHERE = Where((), True, True), Where((), False, False)
ADDED, HIDDEN = Where(BELOW, 0.0, -math.inf), Where(ABOVE.reached, -math.inf, 0.0)
KNOWN: dict[str, tuple[Callable[[], Tensor], Known]] = {
    "less or equal": (lambda: columns() <= rows(), CAUSAL),
    "greater or equal": (lambda: rows() >= columns(), CAUSAL),
    "not greater": (lambda: ~(columns() > rows()), Where(ABOVE.reached, False, True)),
    "less than the next": (lambda: columns() < rows() + 1, CAUSAL),
    "of two dtypes": (lambda: columns() <= rows(dtype=torch.int32), CAUSAL),
    "tril": (lambda: ones().tril(), CAUSAL),
    "the last rows of tril": (lambda: ones().tril()[-5:, -5:], CAUSAL),
    "not triu": (lambda: ones().triu(1).logical_not(), Where(ABOVE.reached, False, True)),
    "tril of floats as bools": (lambda: ones(torch.float32).tril().bool(), CAUSAL),
    "tril of floats above 0": (lambda: ones(torch.float16).tril() > 0, CAUSAL),
    "tril that is 0": (lambda: ones(torch.float32).tril() == 0, Where(BELOW, False, True)),
    "tril of bools that is 0": (lambda: ones().tril() == 0, Where(BELOW, False, True)),
    "transposed": (lambda: ones().triu().t(), CAUSAL),
    "views": (lambda: ones().tril().view(1, 1, 5, 5).squeeze(0)[0], CAUSAL),
    "permuted": (lambda: ones().triu().unsqueeze(0).permute(0, 2, 1)[0], CAUSAL),
    "and True": (lambda: (columns() <= rows()) & torch.ones(5, 1, dtype=torch.bool), CAUSAL),
    "and what it implies": (lambda: ones().tril(2) & (columns() <= rows()) & ones().tril(1), CAUSAL),
    "slices": (lambda: torch.arange(9)[None, 2:7] <= torch.arange(9)[2:7, None], CAUSAL),
    "indices": (lambda: torch.arange(9)[columns()] <= torch.arange(9)[rows()], CAUSAL),
    "a mask by indices": (lambda: torch.ones(9, 9, dtype=torch.bool).tril()[rows(), columns()], CAUSAL),
    "repeated": (lambda: torch.arange(5).repeat(5, 1) <= rows(), CAUSAL),
    "repeated once": (lambda: torch.arange(5).repeat(1, 1) <= rows(), CAUSAL),
    "rounded once": (lambda: torch.full((2,), 2**60 + 2**36 + 1).to(torch.float32), Where((), float(2**60 + 2**37), float(2**60 + 2**37))),
    "counted": (lambda: (ones(torch.int64).cumsum(1) - 1) <= 1 * rows(), CAUSAL),
    "the last query sees all": (lambda: columns() <= rows(1, 4), EVERYWHERE),
    "one sequence": (one_sequence, EVERYWHERE),
    "never": (lambda: columns() > rows() + 5, NOWHERE),
    "all hidden": (lambda: ones().masked_fill(columns() < 5, 0), NOWHERE),
    "added, triu": (lambda: torch.full((5, 5), -math.inf).triu(1), HIDDEN),
    "added, in another dtype": (lambda: torch.full((5, 5), -math.inf).triu(1).to(torch.bfloat16), HIDDEN),
    "added, where": (lambda: torch.where(columns() <= rows(), 0.0, -math.inf), ADDED),
    "added, masked": (lambda: torch.zeros(5, 5).masked_fill(ones(torch.float32).tril() == 0, -math.inf), HIDDEN),
    "added to 0": (lambda: torch.zeros(5, 5) + torch.where(columns() <= rows(), 0.0, -math.inf), ADDED),
    "adds 1": (lambda: torch.zeros(5, 5).masked_fill(ones().tril(), True), Where(BELOW, 1.0, 0.0)),
    "a window": (lambda: (columns() <= rows()) & (columns() > rows() - 3), Where((*BELOW, Affine(2, (-1, 1))), True, False)),
    "rounded": (lambda: torch.full((5, 5), 0.1), Where((), float(torch.tensor(0.1)), float(torch.tensor(0.1)))),
    "a large number": (lambda: torch.full((2,), 2**63, dtype=torch.uint64), Where((), 2**63, 2**63)),
    "not rounded": (lambda: torch.full((5, 5), -1e300, dtype=torch.float64), Where((), -1e300, -1e300)),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_masks_are_known(name: str) -> None:
    function, known = KNOWN[name]
    assert check(function) == known


HUGE = 1 << 40
UNKNOWN: dict[str, Callable[[], Tensor]] = {
    "positions below 0 in bytes": lambda: torch.arange(5, dtype=torch.uint8) - 3,
    "a sum that wraps around": lambda: columns() < rows() + sys.maxsize,
    "a sum that wraps around, int32": lambda: columns(dtype=torch.int32) < rows(dtype=torch.int32) + (2**31 - 1),
    "a number that wraps around": lambda: rows(dtype=torch.int32) - columns(dtype=torch.int32) < HUGE,
    "a number that wraps around, in bytes": lambda: torch.zeros(1, 5, dtype=torch.uint8) > -1,
    "a constant that wraps around": lambda: torch.full((5,), 250, dtype=torch.uint8) + 10 > 200,
    "a tensor without dims that wraps around": lambda: torch.arange(5, dtype=torch.int32) < torch.full((), HUGE),
    "a tensor without dims that wraps around, in bytes": lambda: torch.full((5,), 0, dtype=torch.uint8) < torch.full((), -1),
    "rounded when compared": lambda: torch.full((5,), 0.1, dtype=torch.bfloat16) == 0.1,
    "casts that wrap around": lambda: (torch.arange(5) + 2**32).to(torch.int32) > 100,
    "a constant cast that wraps around": lambda: torch.full((5, 5), 2**32).to(torch.int32) > 0,
    "cut to a whole number": lambda: torch.full((5, 5), 0.5).long(),
    "whole numbers of a rounding dtype": lambda: columns() < torch.full((5, 1), 257, dtype=torch.bfloat16),
    "negative indices count from the end": lambda: torch.arange(5)[torch.arange(5) - 2],
    "pieces that do not continue": lambda: torch.cat([torch.arange(3), torch.arange(3)]),
    "a sum that starts anew": lambda: (torch.arange(5) != 2).cumsum(0),
    "a piece without elements of other dims": lambda: torch.cat([torch.zeros(0), torch.zeros(5, 5)]),
    "products": lambda: rows() * columns() <= 4,
    "positions as floats": lambda: torch.arange(5).float() < 2.5,
    "rows of another shape": lambda: torch.arange(6).view(2, 3),
    "positions repeated": lambda: torch.arange(5).repeat(2),
    "two conditions turned": lambda: ~((columns() <= rows()) & (columns() > rows() - 3)) & ones(),
    "random": lambda: torch.rand(5, 5) < 0.5,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_others_are_unknown(name: str) -> None:
    assert check(UNKNOWN[name]) is None


OF_A_SIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded": lambda x: torch.full((2,), x.shape[0], dtype=torch.bfloat16),
    "compared in bytes": lambda x: torch.arange(3, dtype=torch.int8) < x.shape[0] + 3,
    "wraps around": lambda x: torch.full((3,), x.shape[0] + 1) + sys.maxsize,
}


@pytest.mark.parametrize("name", OF_A_SIZE)
def test_what_a_dtype_may_make_of_a_size_is_unknown(name: str) -> None:
    module = make_fx(OF_A_SIZE[name], tracing_mode="symbolic")(torch.zeros(100))
    assert module.graph.output_node().args[0] not in known_values(n for n in module.graph.nodes if n.op == "call_function")


numbers = st.integers(-3, 3)
dtypes = st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8, torch.float16, torch.float64, torch.bool])
scalars = st.one_of(numbers, st.sampled_from([0.5, 0.1, -math.inf, True, 2**15, 2**31, 255, 256, -1, 2049, -(2**63), 2**63 - 1]))
COMPARISONS = [torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne]


@st.composite
def index(draw: st.DrawFn, shape: tuple[int, int]) -> Tensor:
    """Positions of one dim, shifted, sliced, joined, counted or read from others."""
    dim = draw(st.integers(0, 1))
    n, first = shape[dim], draw(numbers)
    kind = draw(st.sampled_from(["plain", "strided", "joined", "read", "counted"]))
    if kind == "plain":
        value = torch.arange(n, dtype=draw(dtypes.filter(lambda d: d != torch.bool))) + first
    elif kind == "strided":
        value = torch.arange(2 * n + 3)[abs(first) : abs(first) + 2 * n - 1 : 2]
    elif kind == "joined":
        value = torch.cat([torch.arange(1) + first, torch.arange(n)])[draw(st.integers(0, 1)) :][:n]
    elif kind == "counted":
        value = torch.full((n,), first).cumsum(0)
    else:
        value = (torch.arange(n + 6) - first)[torch.arange(n) + draw(st.integers(-2, 3))]
    return value.unsqueeze(1 - dim)


@st.composite
def constant(draw: st.DrawFn, shape: tuple[int, int]) -> Tensor:
    """One number, or two on both sides of a diagonal, perhaps cast, compared or added to."""
    value = torch.full(shape, draw(numbers), dtype=draw(dtypes))
    value = draw(st.sampled_from([value, value.tril(draw(numbers)), value.triu(draw(numbers))]))
    value = value.masked_fill(draw(st.booleans()) & torch.ones(shape, dtype=torch.bool), 1) if draw(st.booleans()) else value
    return value.to(draw(dtypes)) if draw(st.booleans()) else value


@given(st.data(), st.tuples(st.integers(0, 4), st.integers(1, 4)))
def test_whatever_is_known_is_true(data: st.DataObject, shape: tuple[int, int]) -> None:
    def operand() -> Any:
        kind = data.draw(st.sampled_from(["index", "difference", "constant", "number"]))
        if kind == "number":
            return data.draw(scalars)
        if kind == "constant":
            return data.draw(constant(shape))
        one = data.draw(index(shape))
        return one if kind == "index" else one - data.draw(index(shape)) + data.draw(numbers)

    def mask() -> Tensor:
        total = torch.ones(shape, dtype=torch.bool)
        for _ in range(data.draw(st.integers(1, 3))):
            compare, tensor = data.draw(st.sampled_from(COMPARISONS)), data.draw(st.sampled_from([index, constant]))
            one = compare(data.draw(tensor(shape)), operand())
            total = total & (~one if data.draw(st.booleans()) else one)
        kind = data.draw(st.sampled_from(["bool", "where", "filled", "added", "cast", "moved"]))
        if kind == "where":
            return torch.where(total, data.draw(constant(shape)), data.draw(constant(shape)))
        if kind == "filled":
            return data.draw(constant(shape)).masked_fill(total, data.draw(numbers))
        if kind == "added":
            return torch.zeros(shape, dtype=data.draw(dtypes)) + torch.where(total, 0.0, -math.inf)
        if kind == "cast":
            return total.to(data.draw(dtypes))
        return total.unsqueeze(0).repeat(2, 1, 1).transpose(1, 2)[-1] if kind == "moved" else total

    try:
        module = make_fx(mask, tracing_mode="fake")()
    except RuntimeError:  # a number that the dtype does not take
        return
    compared(module)
