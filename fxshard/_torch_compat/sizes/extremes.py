"""Private names of torch (2.13): simplify ``Min`` and ``Max`` of sizes where the symbols' ranges decide which argument wins.

The slice ``x[: n // 2 + 1]`` of a dim of size n has length ``Min(n, n // 2 + 1)``. torch compares the two by their separate ranges only.

What would replace it: a comparison of expressions by torch that uses the symbols' joint ranges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import sympy
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min

EXTREMES = (Min, Max)
_known: WeakKeyDictionary[ShapeEnv, dict[Any, Any]] = WeakKeyDictionary()
"""Results within each environment, by function, expression and the ranges of its symbols, because the same sizes recur."""


@contextlib.contextmanager
def extremes_reduced() -> Iterator[None]:
    """Within it, ``Min`` and ``Max`` of sizes are simplified when created. Otherwise expressions grow with each slice; with it,
    ``cat([x[n // 2:], x[:n // 2]])`` has the size of ``x``."""
    before = SymNode._sym_min, SymNode._sym_max

    def reducing(make: Callable[[SymNode, Any], SymNode]) -> Callable[[SymNode, Any], SymNode]:
        def made(self: SymNode, other: Any) -> SymNode:
            found = make(self, other)
            if isinstance(found, SymNode) and found.shape_env is not None:
                found._expr = without_extremes(found.expr, found.shape_env)
            return found

        return made

    SymNode._sym_min, SymNode._sym_max = map(reducing, before)
    try:
        yield
    finally:
        SymNode._sym_min, SymNode._sym_max = before


def without_extremes(expr: sympy.Basic, env: ShapeEnv) -> sympy.Basic:
    """``expr`` with each ``Min`` and ``Max`` reduced to the arguments that can win, given the symbols' ranges in ``env``."""
    return _remembered(_without_extremes, expr, env) if expr.has(*EXTREMES) else expr


def _remembered(function: Callable[[Any, ShapeEnv], Any], expr: sympy.Basic, env: ShapeEnv) -> Any:
    ranges = tuple((symbol, env.var_to_range.get(symbol)) for symbol in sorted(expr.free_symbols, key=str))
    known, key = _known.setdefault(env, {}), (function, expr, ranges)
    if key not in known:
        known[key] = function(expr, env)
    return known[key]


def _without_extremes(expr: sympy.Basic, env: ShapeEnv) -> sympy.Basic:
    parts = [without_extremes(part, env) for part in expr.args]
    if not isinstance(expr, EXTREMES):
        return expr.func(*parts)
    sign = 1 if isinstance(expr, Min) else -1
    kept: list[sympy.Basic] = []
    for part in parts:
        if any(_remembered(_least, sign * (part - other), env) >= 0 for other in kept):
            continue
        kept = [other for other in kept if not _remembered(_least, sign * (other - part), env) >= 0] + [part]
    return kept[0] if len(kept) == 1 else expr.func(*kept)


def _least(expr: sympy.Expr, env: ShapeEnv) -> Any:
    """A lower bound of the integer ``expr``, from a / b - (b - 1) / b <= a // b <= a / b."""
    expr = sympy.expand(expr)
    for whole in sorted(expr.atoms(FloorDiv), key=str):
        above, below = whole.args
        factor = expr.coeff(whole)
        if not (below.is_Integer and below > 0 and factor.is_number) or (expr - factor * whole).has(whole):
            continue
        expr = sympy.expand(expr.xreplace({whole: above / below if factor < 0 else (above - below + 1) / below}))
    scale = sympy.ilcm(1, *[term.as_coeff_Mul()[0].q for term in sympy.Add.make_args(expr) if term.as_coeff_Mul()[0].is_Rational])
    least = env.bound_sympy(sympy.expand(scale * expr)).lower
    return sympy.ceiling(least / scale) if least.is_Integer else least
