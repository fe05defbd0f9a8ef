"""Dynamic sizes in words: ranges, and the expressions of sizes that files hold, with the user's names.

Needs neither torch nor sympy, so that a program's file is shown at once. The text of an expression is sympy's ``srepr``, as
``shapes.expressions`` writes it: ``Mul(Integer(2), Symbol('s0', integer=True))``.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_TEXT, MAX_POWER, MAX_BITS, MAX_NAME = 50_000, 64, 4096, 1_000
"""Limits of what is read: characters of an expression, magnitude of exponents, bits of numbers, characters of a name."""
_LOGIC = {"And": "and", "Or": "or"}
_RELATIONS = {"Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">", "GreaterThan": ">="}
_QUOTIENTS = {"FloorDiv": "//", "CleanDiv": "//", "IntTrueDiv": "/", "FloatTrueDiv": "/", "Mod": "%", "PythonMod": "%"}
_NAMES = {"Not": "not", "Min": "min", "Max": "max", "OpaqueUnaryFn_sqrt": "sqrt"}


def range_text(least: int, most: int | None) -> str:
    """A range: ``at least 1``, ``from 1 to 64``."""
    return f"at least {least}" if most is None else f"from {least} to {most}"


def served_text(least: int, most: int | None, unit: int) -> str:
    """The sizes that a program serves: a range, and what they are multiples of."""
    span = range_text(least, most)
    return span if unit == 1 else f"{span}, multiples of {unit}"


def expression_words(text: str, names: Mapping[str, tuple[str, int]]) -> str:
    """An expression or condition as it is written by hand: ``2*batch + 1``, ``batch < 1000``. ``names``: by the name of its symbol in
    ``text``, a size's name and unit (the symbol stands for size / unit).

    Raises ValueError for a text that is no expression, KeyError for a symbol without a name.
    """
    if len(text) > MAX_TEXT or any(len(name) > MAX_NAME for name, _ in names.values()):
        raise ValueError(f"an expression of {len(text)} characters, or names of over {MAX_NAME}")
    try:
        tree = ast.parse(text, mode="eval").body
        return str(_Reader({symbol: _Part(Fraction(1, unit), ((name, 1),)) for symbol, (name, unit) in names.items()}).read(tree))
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text[:60]!r} is no expression") from error


@dataclass(frozen=True)
class _Part:
    """A product: a ``number`` times names and calls, each with its power. A sum or a condition is a ``text`` instead."""

    number: Fraction = Fraction(1)
    factors: tuple[tuple[str, int], ...] = ()
    text: str = ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        above = [_power(name, power) for name, power in self.factors if power > 0]
        below = [_power(name, -power) for name, power in self.factors if power < 0]
        number = abs(self.number)
        above = [str(number.numerator)] * (number.numerator != 1 or not above) + above
        below = [str(number.denominator)] * (number.denominator != 1) + below
        divisor = below[0] if len(below) == 1 else f"({'*'.join(below)})"
        return "-" * (self.number < 0) + "*".join(above) + f"/{divisor}" * bool(below)

    def __post_init__(self) -> None:
        if max(self.number.numerator.bit_length(), self.number.denominator.bit_length()) > MAX_BITS or len(self.text) > 4 * MAX_TEXT:
            raise ValueError("an expression grows out of bounds")

    @property
    def as_factors(self) -> tuple[tuple[str, int], ...]:
        return ((f"({self.text})", 1),) if self.text else self.factors

    def operand(self) -> str:
        """In parentheses, unless it is one name, number or call."""
        said = str(self)
        one = len(self.factors) == 1 and self.factors[0][1] == 1 and self.number == 1
        return said if not self.text and (one or said.isdecimal()) else f"({said})"


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}**{power}"


@dataclass(frozen=True)
class _Reader:
    """Reads the syntax tree of an expression."""

    symbols: Mapping[str, _Part]

    def read(self, node: ast.expr) -> _Part:
        if isinstance(node, ast.Name) and node.id in ("true", "false"):
            return _Part(text=node.id)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("an expression consists of calls")
        name, args = node.func.id, node.args
        if name == "Symbol":
            return self.symbols[_literal(args[0])]
        if name in ("Integer", "Rational"):
            return _Part(Fraction(*(int(_literal(arg)) for arg in args)))
        if name == "Float":
            return _Part(factors=((f"{float(_literal(args[0])):.6g}", 1),))
        return _called(name, list(map(self.read, args)))


def _literal(node: ast.expr) -> str:
    return str(ast.literal_eval(node))


def _called(name: str, parts: Sequence[_Part]) -> _Part:
    """A call of a function of sizes, as sympy and torch name them."""
    if name == "Add":
        first, *rest = map(str, parts)
        return _Part(text=first + "".join(f" - {said[1:]}" if said[0] == "-" else f" + {said}" for said in rest))
    if name == "Mul":
        number = math.prod((part.number for part in parts), start=Fraction(1))
        factors = (one for part in parts for one in part.as_factors)
        return _Part(number, tuple(sorted(factors, key=lambda one: (one[0].startswith("("), one[0]))))
    if name in ("Pow", "PowByNatural", "FloatPow"):
        return _powered(*parts)
    if name in _LOGIC:
        return _Part(text=f" {_LOGIC[name]} ".join(f"({part})" if {"and", "or"} & set(part.text.split()) else str(part) for part in parts))
    if name in _RELATIONS:
        return _Part(text=f" {_RELATIONS[name]} ".join(map(str, parts)))
    if name in _QUOTIENTS:
        return _Part(factors=((f"({_QUOTIENTS[name].join(part.operand() for part in parts)})", 1),))
    return _Part(factors=((f"{_NAMES.get(name, name)}({', '.join(map(str, parts))})", 1),))


def _powered(base: _Part, exponent: _Part) -> _Part:
    power = exponent.number
    if exponent.text or exponent.factors or abs(power) > MAX_POWER:
        return _Part(factors=((f"{base.operand()}**{exponent.operand()}", 1),))
    if power == Fraction(1, 2):
        return _Part(factors=((f"sqrt({base})", 1),))
    if power.denominator != 1:
        return _Part(factors=((f"{base.operand()}**({power})", 1),))
    if any(abs(by * power) > MAX_POWER for _, by in base.as_factors) or abs(power) * base.number.numerator.bit_length() > MAX_BITS:
        return _Part(factors=((f"{base.operand()}**{exponent.operand()}", 1),))
    return _Part(base.number ** int(power), tuple((name, by * int(power)) for name, by in base.as_factors))
