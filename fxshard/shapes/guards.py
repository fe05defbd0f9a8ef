"""Guards: the conditions on sizes that a traced or lowered graph assumes, and where each comes from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fxshard._torch_compat.sizes.symbols import evaluated, expression, noted_guards, symbol_of
from fxshard.size_words import expression_words


@dataclass(frozen=True)
class Guard:
    """A condition on sizes. ``symbols``: (name of a size, its symbol in ``expression``, the unit: the symbol stands for size / unit);
    ``where``: the line that assumes it; ``ranks``: (name, symbol, count) of rank numbers 1 to count: the condition must hold for all."""

    expression: sympy.Basic
    symbols: tuple[tuple[str, sympy.Symbol, int], ...]
    where: str
    ranks: tuple[tuple[str, sympy.Symbol, int], ...] = ()

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds for these sizes on every rank. False if it divides by zero or takes the root of a negative number."""
        values = {symbol: sympy.Integer(sizes[name] // unit) for name, symbol, unit in self.symbols}
        try:
            return all(self._holds_on_every_rank(part, values) for part in sympy.And.make_args(self.expression))
        except (ArithmeticError, ValueError):
            return False

    def _holds_on_every_rank(self, part: sympy.Basic, values: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
        """Whether a part of the condition holds for all coordinates on the axes that it names. Checking part by part takes as many
        evaluations as the sum of the axes' sizes, not their product, if each part names one axis."""
        named = [(symbol, count) for _, symbol, count in self.ranks if symbol in part.free_symbols]
        every = itertools.product(*(map(sympy.Integer, range(1, count + 1)) for _, count in named))
        return all(evaluated(part, {**values, **dict(zip((symbol for symbol, _ in named), numbers, strict=True))}) for numbers in every)

    @property
    def condition(self) -> str:
        """The condition in sympy's form, with the names of the sizes: equal for equal conditions."""
        named = {symbol: sympy.Symbol(name if unit == 1 else f"{name}/{unit}") for name, symbol, unit in self.symbols}
        named.update({symbol: sympy.Symbol(name) for name, symbol, _ in self.ranks})
        return str(self.expression.xreplace(named))

    @property
    def words(self) -> str:
        """The condition as it is written by hand, without the line."""
        names = {str(symbol): (name, unit) for name, symbol, unit in self.symbols} | {
            str(symbol): (name, 1) for name, symbol, _ in self.ranks
        }
        try:
            return expression_words(sympy.srepr(self.expression), names)
        except (ValueError, KeyError):  # an expression that no file holds
            return self.condition

    def __str__(self) -> str:
        ranks = ", ".join(f"{name} from 1 to {count}" for name, _, count in self.ranks)
        return f"{self.words}{ranks and f' for {ranks}'} ({self.where})"


Ranks = Mapping[str, tuple[torch.SymInt, int]]
"""By name: (the symbol for a rank's number on an axis, counted from 1; the number of ranks)."""
NO_RANKS: Ranks = {}


def guards_on(
    condition: Any, where: str, symbols: Mapping[str, torch.SymInt], units: Mapping[str, int], ranks: Ranks = NO_RANKS
) -> tuple[Guard, ...]:
    """The guard for a ``condition`` that the line ``where`` assumes. ``symbols``: of sizes, by name; ``units``, ``ranks``: as for
    ``guards_of``."""
    return _guards(expression(condition), symbols, units, where, ranks)


def guards_of(symbols: Mapping[str, torch.SymInt], units: Mapping[str, int] | None = None, ranks: Ranks = NO_RANKS) -> tuple[Guard, ...]:
    """The conditions on ``symbols``, by name, recorded so far. ``units``: each symbol stands for its size / unit, 1 by default. A
    condition on a number in ``ranks`` applies to all of them."""
    env = next((value.node.shape_env for value in symbols.values()), None)
    found = [one for expr, where in noted_guards(env) for one in _guards(expr, symbols, units or {}, where, ranks)]
    return tuple(dict.fromkeys(found))


def _guards(expr: Any, symbols: Mapping[str, torch.SymInt], units: Mapping[str, int], where: str, ranks: Ranks) -> tuple[Guard, ...]:
    if expr == sympy.true:
        return ()
    own = sorted(expr.free_symbols, key=str)
    names = {symbol_of(value): (name, units.get(name, 1)) for name, value in symbols.items()}
    counts = {symbol_of(number): (name, count) for name, (number, count) in ranks.items()}
    sizes = tuple((names[s][0], s, names[s][1]) for s in own if s in names)
    return (Guard(expr, sizes, where, tuple((counts[s][0], s, counts[s][1]) for s in own if s in counts)),)


def distinct(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """One guard for each condition, the first of them: tracing's guards come before those of later passes."""
    found: dict[str, Guard] = {}
    for guard in guards:
        found.setdefault(guard.condition, guard)
    return tuple(found.values())


def determined_by(guards: Iterable[Guard], symbols: Mapping[str, sympy.Symbol]) -> dict[str, sympy.Basic]:
    """The sizes that others determine, by name: as expressions of the others' ``symbols``. An equality determines one size, as do two
    guards that bound a difference from both sides (``length + 1 <= mask`` and ``mask <= length + 1``). Later names are expressed by
    earlier ones."""
    spelled = [guard.expression.xreplace({own: symbols[name] for name, own, _ in guard.symbols}) for guard in guards]
    bounds = [bound for condition in spelled for bound in differences(condition)]
    found: dict[str, sympy.Basic] = {}
    for bound in bounds:
        name = next((n for n in reversed(list(symbols)) if n not in found and abs(bound.coeff(symbols[n])) == 1), None)
        if sympy.expand(-bound) not in bounds or name is None:
            continue
        known = {symbols[n]: expr for n, expr in found.items()}
        value = sympy.expand((symbols[name] - bound.coeff(symbols[name]) * bound).xreplace(known))
        if value.free_symbols and value.free_symbols <= {symbols[n] for n in symbols if n != name and n not in found}:
            found = {n: sympy.expand(expr.xreplace({symbols[name]: value})) for n, expr in found.items()}
            found[name] = value
    return found


def differences(condition: sympy.Basic) -> list[sympy.Expr]:
    """Integer expressions that are at most 0 if ``condition`` holds."""
    if isinstance(condition, sympy.And):
        return [bound for part in condition.args for bound in differences(part)]
    if not isinstance(condition, sympy.Rel) or isinstance(condition, sympy.Ne):
        return []
    difference = sympy.expand(condition.lhs - condition.rhs)
    if isinstance(condition, sympy.Eq):
        return [difference, sympy.expand(-difference)]
    if isinstance(condition, sympy.Ge | sympy.Gt):
        difference = sympy.expand(-difference)
    return [difference + 1 if isinstance(condition, sympy.Lt | sympy.Gt) else difference]


def first_broken(guards: Iterable[Guard], sizes: Mapping[str, int]) -> Guard | None:
    """The first guard that does not hold for these sizes, None if all do."""
    return next((g for g in guards if not g.holds(sizes)), None)
