"""Expressions of sizes in words: Python computes the same from them as sympy from the expression, with sizes that are multiples too."""

from __future__ import annotations

import contextlib
import functools
import math
from fractions import Fraction
from typing import Any

import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxshard._torch_compat.sizes.symbols import evaluated, expression, symbol_of
from fxshard.size_words import MAX_NAME, MAX_TEXT, expression_words, served_text
from tests.shapes.test_expressions import A, B, trees, value

NAMES = [str(symbol_of(one)) for one in (A, B)]
PYTHON = {"sqrt": math.sqrt, "ToFloat": float, "TruncToInt": int}
a, b = (sympy.Symbol(name, integer=True, positive=True) for name in "ab")
HANDS = {"a": ("batch", 1), "b": ("length", 1)}


def said(made: Any, units: tuple[int, int]) -> str:
    return expression_words(sympy.srepr(made), dict(zip(NAMES, zip(("batch", "length"), units, strict=True), strict=True)))


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(1, 50), st.integers(1, 50), st.sampled_from([(1, 1), (2, 1), (3, 4)]))
def test_python_computes_the_same(tree: Any, first: int, second: int, units: tuple[int, int]) -> None:
    made = value(tree)
    assume(isinstance(made, torch.SymInt))
    sizes = {name: Fraction(number * unit) for name, number, unit in zip(("batch", "length"), (first, second), units, strict=True)}
    known = dict(zip((symbol_of(A), symbol_of(B)), map(sympy.Integer, (first, second)), strict=True))
    found = eval(said(expression(made), units), PYTHON | sizes)
    assert math.isclose(found, evaluated(expression(made), known), rel_tol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.sampled_from([a < 3, b >= 2, sympy.Ne(a, b), sympy.Eq(2 * a, b)]),
        lambda one: st.one_of(
            st.tuples(one, one).map(lambda two: sympy.And(*two)), st.tuples(one, one).map(lambda two: sympy.Or(*two)), one.map(sympy.Not)
        ),
        max_leaves=6,
    )
)
def test_conditions(condition: Any) -> None:
    text = expression_words(sympy.srepr(condition), HANDS)
    for x in range(1, 5):
        for y in range(1, 5):
            want = bool(condition.xreplace({a: sympy.Integer(x), b: sympy.Integer(y)}))
            names = {"batch": x, "length": y, "true": True, "false": False}
            assert eval(text, PYTHON | names) == want, text


@pytest.mark.parametrize(
    "made, text",
    [
        (2 * a * b + a - 3, "2*batch*length + batch - 3"),
        (-a * (b + 1), "-batch*(length + 1)"),
        (-a - b, "-batch - length"),
        (a / (2 * b), "batch/(2*length)"),
        (-1 / a, "-1/batch"),
        (sympy.sqrt(a + b), "sqrt(batch + length)"),
        (sympy.Or(sympy.And(a < 5, b > 2), a > 7), "batch > 7 or (length > 2 and batch < 5)"),
        (sympy.Not(sympy.And(a < 5, b > 2)), "not(length > 2 and batch < 5)"),
    ],
)
def test_as_written_by_hand(made: Any, text: str) -> None:
    assert expression_words(sympy.srepr(made), HANDS) == text


def test_a_size_with_a_unit_stands_for_itself() -> None:
    assert expression_words(sympy.srepr(2 * a), {"a": ("batch", 2)}) == "batch"
    assert expression_words(sympy.srepr(2 * a + 1), {"a": ("batch", 4)}) == "batch/2 + 1"
    assert served_text(1, 64, 2) == "from 1 to 64, multiples of 2"


@pytest.mark.parametrize("text", ["1", "a + 1", "__import__('os')()", "(" * 300, "Integer('x')", "Integer(1", "[1]", " " * (MAX_TEXT + 1)])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expression_words(text, HANDS)


BASE = "Symbol('a')"


@pytest.mark.parametrize(
    "text",
    [
        functools.reduce(lambda inner, _: f"Pow({inner}, Integer(64))", range(40), "Integer(3)"),
        functools.reduce(lambda inner, _: f"Pow({inner}, Integer(64))", range(40), BASE),
        functools.reduce(lambda inner, _: f"Mul({inner}, Pow(Integer(2), Integer(60)))", range(90), BASE),
        f"Add({', '.join([BASE] * 3000)})",
        f"Mul(Integer({'9' * 4000}), {BASE})",
    ],
)
def test_hostile_texts_stay_small(text: str) -> None:
    """Either refused or bounded by the text's length times a name's."""
    with contextlib.suppress(ValueError):
        assert len(expression_words(text, {"a": ("n" * MAX_NAME, 1)})) < 4_000_000
    with pytest.raises(ValueError):
        expression_words(BASE, {"a": ("n" * (MAX_NAME + 1), 1)})


def test_an_unknown_symbol_is_refused() -> None:
    with pytest.raises(KeyError):
        expression_words("Symbol('c')", HANDS)
