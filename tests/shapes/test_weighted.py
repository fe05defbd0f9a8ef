"""The largest sizes, at which a memory limit must hold, from the maxima, the example sizes, the number of ranks and the guards."""

from __future__ import annotations

import pytest
import sympy

from fxshard.shapes import DynamicDim, WeightedSizes, largest_sizes
from fxshard.shapes.guards import Guard

S, T = sympy.symbols("s t", integer=True, positive=True)


def dim(name: str = "batch", most: int | None = 512, example: int = 8, uneven: bool = False) -> DynamicDim:
    return DynamicDim(name, (("args[0]", 0),), example, most=most, uneven=uneven)


def guard(condition: sympy.Basic) -> Guard:
    names = ((S, "batch"), (T, "seq"))
    return Guard(condition, tuple((name, symbol, 1) for symbol, name in names if symbol in condition.free_symbols), "here")


@pytest.mark.parametrize(
    ("dims", "sampled", "guards", "largest"),
    [
        ([dim()], [], [], {"batch": 512}),
        ([dim(most=510)], [], [], {"batch": 512}),
        ([dim(most=510, uneven=True)], [], [], {"batch": 510}),
        ([dim(most=None)], [], [], {"batch": 8}),
        ([dim(most=None)], [4, 63], [], {"batch": 63}),
        ([dim(most=None)], [4], [], {"batch": 8}),
        ([dim()], [], [S <= 300], {"batch": 300}),
        ([dim()], [], [S < 300], {"batch": 296}),
        ([dim(uneven=True)], [], [S < 300], {"batch": 299}),
        ([dim(most=510)], [], [sympy.Ne(S, 512)], {"batch": 508}),
        ([dim(most=520)], [], [sympy.Eq(sympy.Mod(S, 16), 0)], {"batch": 512}),
        ([dim()], [], [S < 9], {"batch": 8}),
        ([dim(), dim("seq", 64, 16)], [], [S * T <= 1024], {"batch": 64, "seq": 16}),
    ],
)
def test_known_largest_sizes(dims: list[DynamicDim], sampled: list[int], guards: list[sympy.Basic], largest: dict[str, int]) -> None:
    given = [WeightedSizes((("batch", size),), 1 / len(sampled)) for size in sampled]
    assert largest_sizes(dims, given, 4, [guard(one) for one in guards]) == largest
