"""Size expressions as text, parsed without evaluating it: the form that ``torch.export`` writes, ``Mul(Integer(2), Symbol('s0'))``.

torch's reader passes this text to ``sympy.sympify``, which calls Python's ``eval``, and so is unsafe for untrusted files. This parser
accepts only calls of a fixed list of functions, numbers and known symbols, and limits the size of the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from fxshard._torch_compat.sizes.expressions import FUNCTIONS, WHOLE
from fxshard.errors import FileError

MAX_TEXT, MAX_DEPTH, MAX_CALLS, MAX_ARGUMENTS = 50_000, 60, 2_000, 64
MAX_NUMBER, MAX_DEGREE, MAX_TERMS = 2**63, 8, 1_000
"""Limits of an expression: characters, nesting depth, calls, arguments per call; magnitude of its numbers, its degree, and its number of
terms when expanded."""
ASSUMPTIONS = ("integer", "positive", "nonnegative", "real", "finite")
_LOGIC = (sympy.logic.boolalg.Boolean,)
_PAIR = (FUNCTIONS["ExprCondPair"],)
_KINDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("And", "Or", "Not"), _LOGIC),
    "Piecewise": _PAIR,
    "ExprCondPair": (sympy.Expr, *_LOGIC),
    "Where": (*_LOGIC, sympy.Expr),
}
"""Argument types, by position, of functions that take more than numbers; the last type is that of all further arguments."""
REMEDY = "export the program again"
_TOKEN = re.compile(r"\s*(?:([A-Za-z_]\w{0,60})|(-?\d{1,20})(?![\w.])|'([\w.+-]{1,60})'|([(),=]))", re.ASCII)


def to_text(expression: sympy.Basic) -> str:
    """The text of an expression; raises FileError for one that ``from_text`` would not restore."""
    text, reason = sympy.srepr(expression), ""
    try:
        found = from_text(text, {str(s): s for s in expression.free_symbols})
    except FileError as error:
        found, reason = None, f": {error.what}"
    if found != expression:
        raise FileError(f"the size {str(expression)[:80]} cannot be stored{reason}", remedy="export with this dim static")
    return text


def from_text(text: str, symbols: Mapping[str, sympy.Symbol] | None) -> sympy.Basic:
    """The expression that a text describes, in the given ``symbols``, by name; if None, in symbols made as the text declares them.

    Raises FileError for a text that is malformed, uses an unknown name, or exceeds the limits above.
    """
    if len(text) > MAX_TEXT:
        raise _refused(f"the expression has {len(text)} characters, at most {MAX_TEXT} are read")
    reader = _Reader(text, symbols)
    try:
        found = reader.expression(0).value
    except FileError:
        raise
    except Exception as error:  # sympy's, of any kind
        raise _refused(f"the expression {text[:60]!r} means nothing: {str(error)[:80] or type(error).__name__}") from error
    reader.end()
    return found


def _refused(what: str) -> FileError:
    return FileError(what, remedy=REMEDY)


@dataclass(frozen=True)
class _Part:
    """An expression, with upper bounds of its degree and of its number of terms when expanded."""

    value: sympy.Basic
    degree: int = 1
    terms: int = 1


class _Reader:
    """Reads one text from left to right."""

    def __init__(self, text: str, symbols: Mapping[str, sympy.Symbol] | None) -> None:
        self.text, self.at, self.calls = text, 0, 0
        self.declared, self.own = symbols, dict[str, sympy.Symbol]()
        self.leaves: Mapping[str, Callable[[], _Part]] = {
            "Integer": lambda: _Part(sympy.Integer(self.number())),
            "Rational": self.rational,
            "Float": self.float,
            "Symbol": self.symbol,
        }

    def token(self) -> tuple[str, str]:
        """(kind, text) of the next token: a name, a number, a quoted text or a mark."""
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            raise _refused(f"cannot read the expression {self.text[:60]!r} at character {self.at}")
        self.at = found.end()
        kind = ("name", "number", "quoted", "mark")[found.lastindex - 1]  # type: ignore[operator]
        return kind, found[found.lastindex]  # type: ignore[index]

    def take(self, kind: str, *texts: str) -> str:
        got, text = self.token()
        if got != kind or (texts and text not in texts):
            raise _refused(f"cannot read the expression {self.text[:60]!r}: {text[:20]!r} at character {self.at - len(text)}")
        return text

    def end(self) -> None:
        if self.text[self.at :].strip():
            raise _refused(f"cannot read the expression {self.text[:60]!r} after character {self.at}")

    def number(self) -> int:
        value = int(self.take("number"))
        if abs(value) > MAX_NUMBER:
            raise _refused(f"the number {value} in an expression is too large for a size")
        return value

    def expression(self, depth: int) -> _Part:
        self.calls += 1
        if depth > MAX_DEPTH or self.calls > MAX_CALLS:
            raise _refused(f"the expression {self.text[:60]!r} has more than {MAX_CALLS} calls, or nests deeper than {MAX_DEPTH}")
        name = self.take("name")
        if name in ("true", "false"):
            return _Part(sympy.true if name == "true" else sympy.false)
        if name not in self.leaves and name not in FUNCTIONS:
            raise _refused(f"{name!r} is not a function of sizes")
        self.take("mark", "(")
        if name in self.leaves:
            found = self.leaves[name]()
            self.take("mark", ")")
            return found
        parts = [self.expression(depth + 1)]
        while self.take("mark", ",", ")") == ",":
            parts.append(self.expression(depth + 1))
        return _called(name, parts)

    def rational(self) -> _Part:
        above = self.number()
        self.take("mark", ",")
        below = self.number()
        return _Part(sympy.Rational(above, below))

    def float(self) -> _Part:
        digits = self.take("quoted")
        self.option("precision", "53")
        if not math.isfinite(float(digits)):
            raise _refused(f"{digits[:20]} is not a finite number")
        return _Part(sympy.Float(digits, precision=53))

    def symbol(self) -> _Part:
        name, said = self.take("quoted"), dict[str, bool]()
        while self.text[self.at : self.at + 1] == ",":
            said[self.option(*ASSUMPTIONS)] = True
        if self.declared is None:
            known = self.own.setdefault(name, sympy.Symbol(name, **said))
        elif name in self.declared:
            known = self.declared[name]
        else:
            raise _refused(f"there is no size {name!r}")
        return _Part(known)

    def option(self, *names: str) -> str:
        """Reads ``, name=value``: one of ``names`` with the value True, or ``precision`` with the value in ``names[1]``."""
        self.take("mark", ",")
        value = names[1:] if names[0] == "precision" else ("True",)
        name = self.take("name", *(names[:1] if names[0] == "precision" else names))
        self.take("mark", "=")
        self.take("number" if value[0].isdigit() else "name", *value)
        return name


def _called(name: str, parts: list[_Part]) -> _Part:
    """A call of the function ``name``; raises FileError, before evaluating it, if the result could exceed the limits."""
    degree, terms = max(p.degree for p in parts), 1
    if name == "Add":
        terms = sum(p.terms for p in parts)
    elif name == "Mul":
        degree = sum(p.degree for p in parts if p.value.free_symbols)
        for part in parts:
            terms *= part.terms
    elif name in ("Pow", "PowByNatural", "FloatPow"):
        degree, terms = _of_power(name, parts)
    if len(parts) > MAX_ARGUMENTS or degree > MAX_DEGREE or terms > MAX_TERMS:
        raise _refused("an expression could grow out of bounds: too many arguments, or products and powers of too high a degree")
    for place, part in enumerate(parts):
        kind = _KINDS.get(name, (sympy.Expr,))
        if not isinstance(part.value, kind[min(place, len(kind) - 1)]):
            raise _refused(f"{str(part.value)[:40]} is not a valid argument of {name}")
        if name in WHOLE and part.value.is_integer is not True:
            raise _refused(f"{str(part.value)[:40]} is not a whole number, which {name} requires")
    value: Any = FUNCTIONS[name](*[p.value for p in parts])
    if not isinstance(value, (sympy.Basic, sympy.logic.boolalg.Boolean)):
        raise _refused(f"the result of {name} is not a size")
    if value.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo, sympy.I):
        raise _refused(f"the result of {name} is not a number")
    return _Part(value, max(degree, 1), terms)


def _of_power(name: str, parts: list[_Part]) -> tuple[int, int]:
    """(degree, terms); a power of floats is never expanded."""
    exponent = parts[1].value if len(parts) == 2 else None
    if name == "FloatPow" and isinstance(exponent, sympy.Number):
        return parts[0].degree, 1
    least = -MAX_DEGREE if name == "Pow" else 0
    if not isinstance(exponent, sympy.Integer) or not least <= int(exponent) <= MAX_DEGREE:
        raise _refused(f"a power in an expression is not of a whole number from {least} to {MAX_DEGREE}")
    return parts[0].degree * abs(int(exponent)), parts[0].terms ** abs(int(exponent))
