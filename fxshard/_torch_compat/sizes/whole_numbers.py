"""Private names of torch (2.13): evaluate expressions of sizes with Python's integers and fractions.

``xreplace`` simplifies each subexpression, which takes milliseconds for a minimum within a maximum; guards for every rank need hundreds of
evaluations.

What would replace it: none: sympy would have to be faster.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import sympy
from torch.utils._sympy.functions import CeilDiv, CleanDiv, FloorDiv, Max, Min, Mod, PowByNatural, PythonMod

Number = int | Fraction
LARGEST_POWER = 64


class _OtherError(Exception):
    """The expression contains something that this file does not evaluate."""


def whole(expr: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> int | bool | None:
    """The value of ``expr`` at ``values``, an integer or bool, equal to that of ``xreplace``.

    None where other numbers occur (floats, infinity), where the result is a fraction or undefined, or where a symbol has no value.
    """
    try:
        found = _computed(expr, values, {})
    except (_OtherError, ArithmeticError):
        return None
    return found if isinstance(found, bool) else int(found) if found.denominator == 1 else None


def _computed(expr: Any, values: Mapping[sympy.Symbol, Any], known: dict[sympy.Basic, Any]) -> Any:
    if expr in known:
        return known[expr]
    known[expr] = found = _leaf(expr, values) if not expr.args else _of_parts(expr, [_computed(part, values, known) for part in expr.args])
    return found


def _leaf(expr: Any, values: Mapping[sympy.Symbol, Any]) -> Any:
    value = values.get(expr, expr)
    if isinstance(value, sympy.Integer | int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, sympy.Rational) and value.q:
        return Fraction(value.p, value.q)
    if value in (sympy.true, sympy.false):
        return value is sympy.true
    raise _OtherError


def _of_parts(expr: Any, parts: list[Any]) -> Any:
    if (function := LOGIC.get(type(expr))) is not None:
        taken = all(isinstance(part, bool) for part in parts)
    elif (function := ARITHMETIC.get(type(expr))) is not None:
        taken = not any(isinstance(part, bool) for part in parts)
    else:
        taken = (function := OF_WHOLE.get(type(expr))) is not None and all(type(part) is int for part in parts)
    if function is None or not taken:
        raise _OtherError
    return function(*parts)


def _power(base: Number, exponent: Number) -> Number:
    if type(exponent) is not int or not abs(exponent) <= LARGEST_POWER:
        raise _OtherError
    return base**exponent if exponent >= 0 else Fraction(base) ** exponent


def _remainder(number: int, divisor: int) -> int:
    """The remainder in torch's domain: a nonnegative number and a positive divisor."""
    if number < 0 or divisor < 1:
        raise _OtherError
    return number % divisor


LOGIC: dict[type, Callable[..., Any]] = {
    sympy.And: lambda *parts: all(parts),
    sympy.Or: lambda *parts: any(parts),
    sympy.Not: operator.not_,
}
"""Functions of bools."""
ARITHMETIC: dict[type, Callable[..., Any]] = {
    sympy.Add: lambda *parts: sum(parts),
    sympy.Mul: lambda *parts: math.prod(parts),
    sympy.Pow: _power,
    sympy.ceiling: math.ceil,
    sympy.floor: math.floor,
    **dict.fromkeys((Max, sympy.Max), lambda *parts: max(parts)),
    **dict.fromkeys((Min, sympy.Min), lambda *parts: min(parts)),
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.StrictLessThan: operator.lt,
    sympy.LessThan: operator.le,
    sympy.StrictGreaterThan: operator.gt,
    sympy.GreaterThan: operator.ge,
}
"""Functions of integers and fractions."""
OF_WHOLE: dict[type, Callable[..., Any]] = {
    FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv,
    CeilDiv: lambda number, divisor: -(-number // divisor),
    Mod: _remainder,
    PythonMod: operator.mod,
    sympy.Mod: operator.mod,
    PowByNatural: _power,
}
