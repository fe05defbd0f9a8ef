"""Expressions evaluated in Python integers: the value that sympy gives, or None if it needs other numbers of sympy."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, IntTrueDiv, Max, Min, Mod, PowByNatural, PythonMod

from fxshard._torch_compat.sizes.whole_numbers import whole

N, K = sympy.symbols("n k", integer=True, positive=True)
NUMBERS: tuple[sympy.Basic, ...] = (
    N - 3 * K + 2,
    sympy.ceiling(N / 4) * sympy.floor(K / 3),
    Max(0, Min(sympy.ceiling(N / 4), N - (K - 1) * sympy.ceiling(N / 4))),
    sympy.Max(N, K) - sympy.Min(N, 2 * K),
    FloorDiv(N - 9, K) + CeilDiv(N, K),
    Mod(N, K) + PythonMod(N - 9, K) + sympy.Mod(N, 4),
    N**2 + PowByNatural(2, N),
    N * (K + 1) / (2 * K + 2),
)
CONDITIONS: tuple[sympy.Basic, ...] = (
    (N < K) | (N * K >= 12),
    sympy.And(sympy.Ne(N, K), sympy.Not(sympy.Eq(FloorDiv(N, 2), K)), N / 2 <= K),
    Max(0, N - K) > sympy.Rational(1, 2),
)


@pytest.mark.parametrize("expr", [*NUMBERS, *CONDITIONS], ids=str)
def test_the_value_is_that_of_sympy(expr: sympy.Basic) -> None:
    for n in range(1, 9):
        for k in range(1, 6):
            values = {N: sympy.Integer(n), K: sympy.Integer(k)}
            want, found = expr.xreplace(values), whole(expr, values)
            if want.is_Rational and not want.is_integer:
                assert found is None
            else:
                assert found == (bool(want) if expr in CONDITIONS else int(want)) and type(found) in (int, bool)


@pytest.mark.parametrize(
    ("expr", "values"),
    [
        (N + K, {N: sympy.Integer(2)}),
        (N + 0.5, {N: sympy.Integer(2)}),
        (IntTrueDiv(N, K), {N: sympy.Integer(4), K: sympy.Integer(2)}),
        (N / (K - 1), {N: sympy.Integer(4), K: sympy.Integer(1)}),
        (FloorDiv(N, K - 1), {N: sympy.Integer(4), K: sympy.Integer(1)}),
        (Mod(N - 9, K), {N: sympy.Integer(4), K: sympy.Integer(3)}),
        (sympy.sqrt(N), {N: sympy.Integer(4)}),
        (N, {N: sympy.oo}),
        (N + K, {N: K, K: sympy.Integer(1)}),
    ],
    ids=str,
)
def test_left_to_sympy(expr: sympy.Basic, values: dict[Any, Any]) -> None:
    assert whole(expr, values) is None
