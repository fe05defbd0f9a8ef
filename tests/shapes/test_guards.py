"""Guards that determine one size from others, by an equality or two bounds on a difference; guards that must hold on every rank."""

from __future__ import annotations

import pytest
import sympy

from fxshard.layout.layouts import Layout, local_shape
from fxshard.mesh.mesh import Mesh
from fxshard.shapes import Guard, determined_by, guards

KEYS, MASK, OTHER = sympy.symbols("s0 s1 s2", integer=True, positive=True)
SYMBOLS = {"keys": KEYS, "mask": MASK, "other": OTHER}


def settled(*conditions: sympy.Basic) -> dict[str, str]:
    names = {symbol: sympy.Symbol(name) for name, symbol in SYMBOLS.items()}
    every = tuple((name, symbol, 1) for name, symbol in SYMBOLS.items())
    found = determined_by([Guard(condition, every, "line") for condition in conditions], SYMBOLS)
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
def test_sizes_that_guards_determine(conditions: tuple[sympy.Basic, ...], want: dict[str, str]) -> None:
    assert settled(*conditions) == want


def test_a_guard_may_have_its_own_symbols() -> None:
    """Dynamo uses other symbols for the same sizes."""
    a, b = sympy.symbols("d0 d1", integer=True)
    guard = Guard(sympy.Eq(a + 1, b), (("keys", a, 1), ("mask", b, 1)), "line")
    assert determined_by([guard], SYMBOLS) == {"mask": KEYS + 1}


def test_a_guard_of_every_rank() -> None:
    """It is checked with the length of each rank's shard: no shard of ``keys`` on 4 x 3 ranks may be empty."""
    ranks = sympy.symbols("r0 r1", integer=True, positive=True)
    length = sympy.Max(0, sympy.Min(sympy.ceiling(KEYS / 4), KEYS - (ranks[0] - 1) * sympy.ceiling(KEYS / 4)))
    step = sympy.ceiling(length / 3)
    own = sympy.Max(0, sympy.Min(step, length - (ranks[1] - 1) * step))
    guard = Guard(own > 0, (("keys", KEYS, 2),), "line", (("on_a", ranks[0], 4), ("on_b", ranks[1], 3)))
    mesh = Mesh({"a": 4, "b": 3})
    found = [size for size in range(1, 40) if guard.holds({"keys": 2 * size + 1})]
    shards = {n: [local_shape((n,), Layout.parse("S(0)S(0)"), (4, 3), c) for c in mesh.coordinates()] for n in range(1, 40)}
    assert found == [n for n, each in shards.items() if (0,) not in each]
    assert 12 in found and 13 not in found
    assert "for on_a from 1 to 4, on_b from 1 to 3 (line)" in str(guard) and "r0" not in str(guard)


def test_conditions_on_single_axes_are_not_evaluated_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are evaluated for 8 and 16 coordinates, not for 128 ranks. A condition on both axes is evaluated for all ranks."""
    a, b = sympy.symbols("r0 r1", integer=True, positive=True)
    asked: list[sympy.Basic] = []
    real = guards.evaluated
    monkeypatch.setattr(guards, "evaluated", lambda expr, values: (asked.append(expr), real(expr, values))[1])
    for condition, most, fails_at in (((a * KEYS < 25) & (b + KEYS < 22), 25, 4), (a * b * KEYS < 2**9, 129, 4)):
        guard = Guard(condition, (("keys", KEYS, 1),), "line", (("on_a", a, 8), ("on_b", b, 16)))
        asked.clear()
        assert guard.holds({"keys": fails_at - 1}) == all(
            condition.xreplace({a: i, b: j, KEYS: fails_at - 1}) for i in range(1, 9) for j in range(1, 17)
        )
        assert len(asked) <= most and guard.holds({"keys": fails_at - 1}) and not guard.holds({"keys": fails_at})
