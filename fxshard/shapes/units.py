"""Units: each dynamic size must be a multiple of its unit, so that all shards of a plan are even."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy

from fxshard._torch_compat.sizes.symbols import evaluated, expression, is_symbolic
from fxshard.errors import SizesError

Cuts = Iterable[tuple[Any, int]]
"""(size of a dim, number of shards)."""


def units_of(cuts: Cuts, symbols: Mapping[str, sympy.Symbol]) -> dict[str, int]:
    """The smallest unit of each size, by name. Raises SizesError for a dim that no units make even, such as one of size s - 1."""
    wanted = dict.fromkeys((expression(size), parts) for size, parts in cuts if is_symbolic(size) and parts > 1)
    units = dict.fromkeys(symbols, 1)
    names = {symbol: name for name, symbol in symbols.items()}
    for expr, parts in sorted(wanted, key=lambda cut: (len(cut[0].free_symbols), str(cut[0]), cut[1])):
        _widen(units, names, expr, parts)
    return units


def _widen(units: dict[str, int], names: Mapping[sympy.Symbol, str], expr: sympy.Expr, parts: int) -> None:
    """Enlarges the units of symbols in ``expr``, the first symbols first, until it is a multiple of ``parts``."""
    if _divides(expr, parts, units, names):
        return
    for symbol in sorted(expr.free_symbols, key=lambda s: list(names).index(s)):
        name, before = names[symbol], units[names[symbol]]
        for times in (1, 2, 4, 8):  # a size that was halved, by pooling for example, needs twice the unit
            units[name] = math.lcm(before, parts * times)
            if _divides(expr, parts, units, names):
                return
        units[name] = math.lcm(before, parts)
    said = expr.xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()})
    raise SizesError(
        f"a dim of size {said} is cut into {parts} parts, which are uneven whatever the sizes",
        remedy="plan for one size, or keep this dim whole by a pin",
    )


def _divides(expr: sympy.Expr, parts: int, units: Mapping[str, int], names: Mapping[sympy.Symbol, str]) -> bool:
    counted = sympy.expand(expr.xreplace({s: units[names[s]] * s for s in expr.free_symbols}))
    terms = counted.args if isinstance(counted, sympy.Add) else (counted,)
    return all(isinstance(c := term.as_coeff_Mul()[0], sympy.Integer) and int(c) % parts == 0 for term in terms)


def depends_on(size: Any, symbols: Collection[sympy.Symbol]) -> bool:
    """Whether a size is an expression of any of these symbols."""
    return is_symbolic(size) and not expression(size).free_symbols.isdisjoint(symbols)


def range_in_units(least: int, most: int | None, unit: int, example: int) -> tuple[int, int | None]:
    """The range of size / ``unit``, so that expressions of its symbol simplify like those of the size; it contains ``example``."""
    return -(-least // unit), None if most is None else max(most // unit, example)


def evaluate_all(shape: Sequence[Any], values: Mapping[sympy.Symbol, sympy.Integer]) -> tuple[int, ...]:
    """A shape with ``values`` substituted for its symbols."""
    return tuple(evaluated(expression(size), values) if is_symbolic(size) else size for size in shape)
