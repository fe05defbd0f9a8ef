"""For which sizes a reshape or ``contiguous`` returns a view of its input, as conditions on the symbols of its shape and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from fxshard._torch_compat.sizes.symbols import expression, is_symbolic

Sizes = Sequence[sympy.Expr]


def is_contiguous_if(shape: Sequence[Any], strides: Sequence[Any]) -> sympy.Basic:
    """The condition under which a tensor with at least one element is contiguous, its dims in the given order."""
    sizes, steps = _expressions(shape), _expressions(strides)
    behind = _products(sizes)
    return sympy.And(*(sympy.Or(_equal(n, 1), _equal(step, behind[i + 1])) for i, (n, step) in enumerate(zip(sizes, steps, strict=True))))


def is_viewed_if(shape: Sequence[Any], strides: Sequence[Any], new_shape: Sequence[Any]) -> sympy.Basic:
    """The condition under which ``reshape`` to ``new_shape`` returns a view of a tensor with at least one element.

    Dims i < j with only dims of size 1 between them are merged if stride i = size j * stride j. If they cannot be merged, a dim of the
    result must begin where j begins: from there on, input and result have the same number of elements.
    """
    sizes, steps = _expressions(shape), _expressions(strides)
    behind, begins = _products(sizes), _products(_expressions(new_shape))
    needed = []
    for j in range(len(sizes)):
        kept = [_equal(behind[j], begin) for begin in begins]
        for i in range(j):
            between = [sympy.Not(_equal(n, 1)) for n in sizes[i + 1 : j]]
            merged = _equal(steps[i], sizes[j] * steps[j])
            needed.append(_any(_equal(sizes[i], 1), _equal(sizes[j], 1), *between, merged, *kept))
    return sympy.And(*needed)


def _expressions(values: Sequence[Any]) -> list[sympy.Expr]:
    return [expression(value) if is_symbolic(value) else sympy.Integer(value) for value in values]


def _products(sizes: Sizes) -> list[sympy.Expr]:
    """The number of elements from each dim on, 1 after the last."""
    products: list[sympy.Expr] = [sympy.Integer(1)]
    for size in reversed(sizes):
        products.append(products[-1] * size)
    return products[::-1]


def _equal(a: Any, b: Any) -> sympy.Basic:
    """``a == b`` in lowest terms: ``4*s*t == 4*t`` as ``s == 1``."""
    factors = [f for f in sympy.Mul.make_args(sympy.factor(a - b)) if not (f.is_number and f != 0) and not f.is_positive]
    return sympy.Or(*map(_zero, factors))


def _any(*terms: sympy.Basic) -> sympy.Basic:
    """The disjunction, without conjunctions that another term makes needless."""
    either = set(sympy.Or.make_args(sympy.Or(*terms)))
    return sympy.Or(*(term for term in either if not isinstance(term, sympy.And) or either.isdisjoint(term.args)))


def _zero(term: sympy.Expr) -> sympy.Basic:
    """``term == 0`` with positive terms on each side, a number on the right; ``s*t == 1`` as ``s == 1`` and ``t == 1``."""
    left = sympy.Add(*(part for part in sympy.Add.make_args(term) if not part.could_extract_minus_sign()))
    right = left - term
    left, right = (right, left) if left.is_number else (left, right)
    factors = sympy.Mul.make_args(left) if right == 1 else (left,)
    return sympy.And(*(sympy.Eq(factor, right) for factor in factors))
