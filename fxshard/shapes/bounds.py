"""Guards as bounds: what a caller can check with two comparisons a size, without an algebra system."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import sympy

from fxshard.shapes.dims import Ranged
from fxshard.shapes.guards import Guard, differences


@dataclass(frozen=True)
class Bounds(Ranged):
    """The least and the most that a size may be; None: without an upper end."""

    least: int = 1
    most: int | None = None


def bounds_of(guards: Iterable[Guard], ranges: Mapping[str, Ranged]) -> tuple[dict[str, Bounds], tuple[Guard, ...]]:
    """The ranges of the sizes, by name, in which ``ranges`` and all ``guards`` hold, and the guards that no range expresses: on several
    sizes, not linear, or that leave a gap."""
    found = {name: Bounds(one.least, one.most) for name, one in ranges.items()}
    gaps, rest = list[tuple[Guard, str, int]](), list[Guard]()
    for guard in guards:
        of = {symbol: (name, unit) for name, symbol, unit in guard.symbols}
        for part in _on_every_rank(guard):
            symbols = [symbol for symbol in part.free_symbols if symbol in of]
            linear = [_slope(one, symbols) for one in _parts(part)]
            if len(symbols) != 1 or not linear or None in linear:
                rest.append(guard)
                continue
            name, unit = of[symbols[0]]
            for slope, constant in filter(None, linear):
                edge = sympy.Rational(-constant, slope)
                if isinstance(part, sympy.Ne):
                    gaps += [(guard, name, int(edge) * unit)] if edge.is_integer else []
                elif slope > 0:
                    found[name] = _narrowed(found[name], most=int(sympy.floor(edge)) * unit)
                else:
                    found[name] = _narrowed(found[name], least=int(sympy.ceiling(edge)) * unit)
    for guard, name, hole in sorted(gaps, key=lambda one: one[2]):
        if found[name].least == hole:
            found[name] = _narrowed(found[name], least=hole + 1)
        elif found[name].allows(hole):
            rest.append(guard)
    return found, tuple(dict.fromkeys(rest))


def _on_every_rank(guard: Guard) -> Iterator[sympy.Basic]:
    """The parts of its condition that are not true anyway, with the numbers of the ranks put in."""
    for part in sympy.And.make_args(guard.expression):
        ranks = [(symbol, range(1, count + 1)) for _, symbol, count in guard.ranks if symbol in part.free_symbols]
        for numbers in itertools.product(*(every for _, every in ranks)):
            one = part.xreplace({symbol: sympy.Integer(n) for (symbol, _), n in zip(ranks, numbers, strict=True)})
            yield from (each for each in sympy.And.make_args(one) if each != sympy.true)


def _parts(part: sympy.Basic) -> list[sympy.Expr]:
    """Expressions that are at most 0 if ``part`` holds, or, for an inequality of the kind ``a != b``, that must not be 0."""
    return [sympy.expand(part.lhs - part.rhs)] if isinstance(part, sympy.Ne) else differences(part)


def _slope(expr: sympy.Expr, symbols: list[sympy.Symbol]) -> tuple[int, int] | None:
    """Slope and constant of a linear expression with whole coefficients in one symbol."""
    if len(symbols) != 1:
        return None
    slope = expr.coeff(symbols[0])
    constant = expr - slope * symbols[0]
    return (int(slope), int(constant)) if isinstance(slope, sympy.Integer) and isinstance(constant, sympy.Integer) and slope else None


def _narrowed(one: Bounds, least: int = 0, most: int | None = None) -> Bounds:
    ends = [end for end in (one.most, most) if end is not None]
    return Bounds(max(one.least, least), min(ends, default=None))
