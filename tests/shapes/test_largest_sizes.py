"""The largest sizes, at which a memory limit must hold, where guards relate several dims; compared with an enumeration of all sizes."""

from __future__ import annotations

from itertools import product

import pytest
import sympy

from fxshard.shapes import DynamicDim, Guard, first_broken, largest_sizes

B, S = sympy.symbols("b s", integer=True, positive=True)


def guards(*conditions: sympy.Basic) -> tuple[Guard, ...]:
    named = {B: "b", S: "s"}
    return tuple(Guard(c, tuple((named[x], x, 1) for x in sorted(c.free_symbols, key=str)), "model.py:1") for c in conditions)


def dim(name: str, example: int, most: int | None, uneven: bool = False) -> DynamicDim:
    return DynamicDim(name, ((f"args[{name}]", 0),), example, 1, most, uneven=uneven)


@pytest.mark.parametrize("unit, uneven", [(1, True), (4, False)])
@pytest.mark.parametrize(
    "given",
    [
        guards(),
        guards(B <= S),
        guards(B <= S, S <= B + 8),
        guards(S <= B),
        guards(B * S <= 300),
        guards(B <= S + 4, B * S <= 512),
        guards(sympy.Eq(sympy.Mod(B + S, 8), 0), B <= S),
    ],
    ids=lambda g: " and ".join(map(str, g)) or "nothing",
)
def test_no_dim_can_grow_alone(given: tuple[Guard, ...], unit: int, uneven: bool) -> None:
    dims = [dim("b", 8, 32, uneven), dim("s", 8, 64, uneven)]
    found = largest_sizes(dims, (), unit, given)
    assert first_broken(given, found) is None and found["b"] % unit == found["s"] % unit == 0
    legal = {(b, s) for b, s in product(range(8, 33, unit), range(8, 65, unit)) if first_broken(given, {"b": b, "s": s}) is None}
    b, s = found["b"], found["s"]
    assert (b, s) in legal
    near = {(x, s) for x in range(b + unit, 33, unit)} | {(b, y) for y in range(s + unit, 65, unit)}
    assert not near & legal or any(g.expression.has(sympy.Mod) for g in given)


def test_dims_that_bound_each_other_grow_together() -> None:
    """If each dim grew alone from the example, ``b <= s`` would keep the batch at 8."""
    dims = [dim("b", 8, 32), dim("s", 8, 64)]
    assert largest_sizes(dims, (), 4, guards(B <= S)) == {"b": 32, "s": 64}
    assert largest_sizes(dims, (), 4, guards(B <= S, S <= 40)) == {"b": 32, "s": 40}
    assert largest_sizes(dims, (), 4, guards(B <= S, S < 30)) == {"b": 28, "s": 28}
    assert largest_sizes(dims[::-1], (), 4, guards(B * S <= 300)) == {"s": 36, "b": 8}  # the first dim grows first
    assert largest_sizes([dim("b", 8, None), dim("s", 8, 64)], (), 4, guards(B <= S)) == {"b": 8, "s": 64}
