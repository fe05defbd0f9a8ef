"""Guards as bounds, beside each guard evaluated at every size."""

from __future__ import annotations

import itertools

import pytest
import sympy

from fxshard.shapes import Bounds, Guard, bounds_of

A, B, RANK = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1", "u0"))
Symbols = tuple[tuple[str, sympy.Symbol, int], ...]
SIZES, ROWS = (("rows", A, 1),), (("rows", A, 3),)
TP = (("tp", RANK, 4),)


def guard(condition: sympy.Basic, sizes: Symbols = SIZES, ranks: Symbols = ()) -> Guard:
    return Guard(condition, sizes, "model.py:1", ranks)


@pytest.mark.parametrize(
    "guards",
    [
        [guard(A <= 17)],
        [guard(A < 17), guard(A >= 3)],
        [guard(2 * A - 5 > 4), guard(3 * A < 50)],
        [guard(sympy.And(A > 2, A < 9, evaluate=False))],
        [guard(sympy.Ne(A, 1)), guard(sympy.Ne(A, 2)), guard(sympy.Ne(A, 31))],
        [guard(sympy.Eq(2 * A, 14))],
        [guard(A < 5, ROWS), guard(A > 1, ROWS), guard(sympy.Ne(A, 2), ROWS)],
        [guard(A >= 2 * RANK, ranks=TP)],
        [guard(A < 3), guard(A > 5)],
    ],
    ids=lambda guards: "; ".join(map(str, guards)),
)
def test_bounds_hold_where_the_guards_do(guards: list[Guard]) -> None:
    found, rest = bounds_of(guards, {"rows": Bounds(1, 30)})
    unit = guards[0].symbols[0][2]
    for rows in range(unit, 60, unit):
        assert found["rows"].allows(rows) == (rows <= 30 and all(one.holds({"rows": rows}) for one in guards))
    assert not rest


def test_what_no_bound_expresses_is_said() -> None:
    both = (("rows", A, 1), ("columns", B, 1))
    guards = [guard(A <= B, both), guard(sympy.Ne(A, 7)), guard(sympy.Eq(sympy.Mod(A, 2), 0)), guard(sympy.Or(A < 2, A > 8))]
    found, rest = bounds_of([*guards, guard(A <= 20)], {"rows": Bounds(1, None), "columns": Bounds(2, None)})
    assert found == {"rows": Bounds(1, 20), "columns": Bounds(2, None)}
    assert set(rest) == set(guards)


def test_no_guard_is_lost_that_a_bound_and_the_rest_both_lack() -> None:
    """Guards of all kinds in pairs: where bounds allow a size and the rest holds, so do all guards."""
    kinds = [guard(A > 3), guard(sympy.Ne(A, 4)), guard(A**2 < 90), guard(sympy.Ne(2 * A, 9)), guard(A * RANK < 40, ranks=TP)]
    for pair in itertools.combinations(kinds, 2):
        found, rest = bounds_of(pair, {"rows": Bounds(1, None)})
        for rows in range(1, 60):
            allowed = found["rows"].allows(rows) and all(one.holds({"rows": rows}) for one in rest)
            assert allowed == all(one.holds({"rows": rows}) for one in pair)
