"""Expressions of sizes as text: they read back unchanged, no text is executed, and none may exceed the limits of the reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard._torch_compat.sizes.symbols import SymbolEnv, evaluated, expression, symbol_of
from fxshard.errors import FileError
from fxshard.layout.layouts import nested_chunk
from fxshard.shapes.expressions import MAX_ARGUMENTS, MAX_TEXT, from_text, to_text

ENV = SymbolEnv()
A, B = ENV.symbol("a", 6), ENV.symbol("b", 9)
SYMBOLS = {str(s): s for s in map(symbol_of, (A, B))}
S = sympy.srepr(symbol_of(A))

numbers = st.sampled_from([A, B]) | st.integers(-9, 9)
two: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "min": torch.sym_min,
    "max": torch.sym_max,
    "truediv": lambda x, y: torch.sym_int(x / y),
}


@st.composite
def trees(draw: Any, depth: int = 3) -> Any:
    """A tree of operations whose divisors are numbers of at least 1."""
    if depth == 0 or draw(st.booleans()):
        return draw(numbers)
    name = draw(st.sampled_from(sorted(two)))
    right = draw(st.integers(1, 7)) if name in ("floordiv", "mod", "truediv") else draw(trees(depth - 1))
    return name, draw(trees(depth - 1)), right


def value(tree: Any, sizes: dict[str, int] | None = None) -> Any:
    """The value of the tree: a SymInt, or a Python number if ``sizes`` are given."""
    if isinstance(tree, tuple):
        return two[tree[0]](value(tree[1], sizes), value(tree[2], sizes))
    return tree if sizes is None or isinstance(tree, int) else sizes[str(symbol_of(tree))]


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(1, 50), st.integers(1, 50))
def test_roundtrip_agrees_with_python(tree: Any, a: int, b: int) -> None:
    made = value(tree)
    if not isinstance(made, torch.SymInt):
        return
    again = from_text(to_text(expression(made)), SYMBOLS)
    assert again == expression(made)
    assert evaluated(again, {symbol_of(A): sympy.Integer(a), symbol_of(B): sympy.Integer(b)}) == value(
        tree, {str(symbol_of(A)): a, str(symbol_of(B)): b}
    )


@settings(max_examples=40, deadline=None)
@given(trees(), trees(), st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
def test_roundtrip_of_conditions(left: Any, right: Any, name: str) -> None:
    made = {"eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge}[name]
    sides = [expression(v) if isinstance(v, torch.SymInt) else sympy.Integer(v) for v in (value(left), value(right))]
    condition = sympy.And(made(*sides), sympy.Not(sympy.Eq(sides[0], 3)))
    assert from_text(to_text(condition), SYMBOLS) == condition


@pytest.mark.parametrize("parts", [(2,), (3, 2), (2, 2, 2)])
def test_lengths_of_nested_chunks(parts: tuple[int, ...]) -> None:
    """The largest expressions that lowering makes."""
    length = nested_chunk(A, parts, tuple(n - 1 for n in parts))[1]
    again = from_text(to_text(expression(length)), SYMBOLS)
    assert again == expression(length)
    for size in (1, 5, 12, 29):
        assert evaluated(again, {symbol_of(A): sympy.Integer(size)}) == nested_chunk(size, parts, tuple(n - 1 for n in parts))[1]


HOSTILE = [
    ("__import__('os').system('true')", "not a function of sizes"),
    ("eval(Integer(1))", "not a function of sizes"),
    ("lambda: 1", "not a function of sizes"),
    (f"{S}.func({S})", "cannot read"),
    ("Symbol('other', integer=True)", "there is no size 'other'"),
    ("Symbol('s99', commutative=False)", "cannot read"),
    ("Integer(1.5)", "cannot read"),
    (f"Integer({10**19})", "too large"),
    (f"Integer({10**30})", "cannot read"),
    ("Float('1e999', precision=53)", "not a finite number"),
    ("FloorDiv(Integer(1), Integer(0))", "means nothing"),
    ("Add(Integer(1), true)", "True is not a valid argument of Add"),
    (f"Min({S}, true)", "not a valid argument of Min"),
    ("And(Integer(1), true)", "1 is not a valid argument of And"),
    (f"FloorDiv({S})", "means nothing"),
    (f"ModularIndexing({S}, Float('3.0', precision=53), Integer(4))", "not a whole number, which ModularIndexing requires"),
    ("ModularIndexing(Rational(9, 8), Integer(7), Integer(2))", "not a whole number"),
    ("CeilDiv(PowByNatural(Integer(-9223372036854775808), Integer(1)), Rational(1, 3))", "not a whole number"),
    (f"Piecewise(ExprCondPair({S}, StrictLessThan(Integer(0), ModularIndexing(Rational(9, 8), Integer(7), Integer(9)))))", "whole"),
    ("Integer(1) Integer(2)", "cannot read"),
    ("Add(Integer(1)", "cannot read"),
    ("", "cannot read"),
]


@pytest.mark.parametrize(("text", "what"), HOSTILE)
def test_hostile_texts_are_refused(text: str, what: str) -> None:
    with pytest.raises(FileError, match=what):
        from_text(text, SYMBOLS)


def _nested(head: str, tail: str, count: int) -> str:
    return head * count + S + tail * count


BOMBS = {
    "a tower of powers": _nested("Pow(", ", Integer(8))", 30),
    "a large power": "Pow(Integer(10), Integer(1000000000))",
    "a symbol as power": f"Pow(Integer(2), {S})",
    "nested deeply": _nested("Abs(", ")", 5000),
    "too long": f"Add({S}, {' ' * MAX_TEXT}Integer(1))",
    "too wide": f"Add({', '.join([S] * (MAX_ARGUMENTS + 1))})",
    "a product of sums": f"Mul({', '.join([f'Add({S}, Integer(1), Integer(2))'] * 8)})",
    "too many calls": f"Max({', '.join(['Add(' + ', '.join([S] * 60) + ')'] * 60)})",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    start = time.process_time()
    with pytest.raises(FileError, match=r"out of bounds|power|nests deeper|characters"):
        from_text(BOMBS[name], SYMBOLS)
    assert time.process_time() - start < 2


def test_unreadable_expressions_are_not_written() -> None:
    with pytest.raises(FileError, match="power"):
        to_text(symbol_of(A) ** 9)
    with pytest.raises(FileError, match="not a function of sizes"):
        to_text(sympy.sin(symbol_of(A)))
