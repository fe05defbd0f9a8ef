"""Sizes that guards settle by others: by equalities, and by two bounds of one difference."""

from __future__ import annotations

import pytest
import sympy

from fxshard.shapes import Guard, settled_by

KEYS, MASK, OTHER = sympy.symbols("s0 s1 s2", integer=True, positive=True)
SYMBOLS = {"keys": KEYS, "mask": MASK, "other": OTHER}


def settled(*conditions: sympy.Basic) -> dict[str, str]:
    names = {symbol: sympy.Symbol(name) for name, symbol in SYMBOLS.items()}
    every = tuple((name, symbol, 1) for name, symbol in SYMBOLS.items())
    found = settled_by([Guard(condition, every, "line") for condition in conditions], SYMBOLS)
    return {name: str(expr.xreplace(names)) for name, expr in found.items()}


@pytest.mark.parametrize(
    ("conditions", "want"),
    [
        ((sympy.Eq(MASK, KEYS + 1),), {"mask": "keys + 1"}),
        ((sympy.Le(KEYS + 1, MASK), sympy.Le(MASK, KEYS + 1)), {"mask": "keys + 1"}),
        ((sympy.Lt(KEYS, MASK), sympy.Ge(KEYS + 1, MASK)), {"mask": "keys + 1"}),
        ((sympy.Le(KEYS, MASK), sympy.Le(MASK, KEYS + 1)), {}),
        ((sympy.Le(KEYS + 1, MASK), sympy.Ne(MASK, KEYS)), {}),
        ((sympy.Eq(2 * MASK, 3 * KEYS),), {}),
        ((sympy.Eq(MASK, 2 * KEYS), sympy.Eq(OTHER, MASK + KEYS)), {"mask": "2*keys", "other": "3*keys"}),
        ((sympy.Eq(OTHER, MASK), sympy.Eq(MASK, KEYS)), {"mask": "keys", "other": "keys"}),
        ((sympy.Eq(MASK, 4),), {}),
    ],
)
def test_what_settles_a_size(conditions: tuple[sympy.Basic, ...], want: dict[str, str]) -> None:
    assert settled(*conditions) == want


def test_guards_of_symbols_of_their_own() -> None:
    """Dynamo's symbols for the same sizes are others."""
    a, b = sympy.symbols("d0 d1", integer=True)
    guard = Guard(sympy.Eq(a + 1, b), (("keys", a, 1), ("mask", b, 1)), "line")
    assert settled_by([guard], SYMBOLS) == {"mask": KEYS + 1}
