"""Dynamic sizes in a file: their names and ranges, the guards on them, and expressions as text.

Expressions have the format of ``torch.export``; ``shapes.expressions`` reads them without evaluating code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.sizes.symbols import SymbolEnv, evaluated, expression, hint_of, is_symbolic, symbol_of
from fxshard.errors import FileError
from fxshard.files import Field, Readers
from fxshard.mesh.mesh import Mesh
from fxshard.program.sharded_program import ProgramSize, coordinate_symbols
from fxshard.shapes import Guard, depends_on, range_in_units
from fxshard.shapes.expressions import from_text, to_text
from fxshard.size_words import MAX_NAME

MAX_SIZES, LARGEST = 32, 2**40
"""Limits on what is read: number of dynamic sizes, and values of sizes."""


def write_size(size: Any) -> int | str:
    """A number unchanged, an expression as text."""
    return to_text(expression(size)) if is_symbolic(size) else size


def write_sizes(sizes: Iterable[ProgramSize]) -> list[dict[str, Any]]:
    """The dynamic sizes of a program as plain data; ``symbol`` stands for it in expressions, and ``example`` is in multiples of the unit,
    like the symbol."""
    return [
        {
            "name": one.name,
            "symbol": str(symbol_of(one.value)),
            "places": [list(place) for place in one.places],
            "unit": one.unit,
            "example": hint_of(one.value),
            "least": one.least,
            "most": one.most,
            "uneven": one.uneven,
        }
        for one in sizes
    ]


def write_guards(guards: Iterable[Guard]) -> list[dict[str, Any]]:
    """Guards as plain data: the condition; for each symbol of a size, the size's name and unit; for each symbol of a rank's coordinate, its
    name and the number of ranks."""
    return [
        {
            "condition": to_text(g.expression),
            "sizes": [[name, str(symbol), unit] for name, symbol, unit in g.symbols],
            **({"ranks": [[name, str(symbol), count] for name, symbol, count in g.ranks]} if g.ranks else {}),
            "where": g.where,
        }
        for g in guards
    ]


class FileSizes:
    """The dynamic sizes of a file being read, with fresh symbols; ``mode``: the fake mode of its graphs' values.

    ``mesh``: given if the graphs also contain symbols for ranks' coordinates.
    """

    def __init__(self, sizes: Sequence[Field] = (), mesh: Mesh | None = None) -> None:
        self.env = SymbolEnv()
        self.sizes = tuple(self._size(field) for field in sizes)
        self.ranks = () if mesh is None else coordinate_symbols(mesh, self.env)
        shape_env = self.env.shape_env if self.sizes or self.ranks else None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
        self.values = [one.value for one in (*self.sizes, *self.ranks)]
        self.symbols = {str(symbol_of(value)): symbol_of(value) for value in self.values}
        self.example = {symbol_of(value): sympy.Integer(hint_of(value)) for value in self.values}
        self.known: dict[str, Any] = {}

    def _size(self, field: Field) -> ProgramSize:
        readers: Readers = {
            "name": Field.text,
            "symbol": Field.text,
            "places": lambda f: f.tuple_of(_place),
            **{key: lambda f: _count(f, 1) for key in ("unit", "example", "least")},
            "most": lambda f: f.optional(lambda one: _count(one, field.value["least"])),
            "uneven": Field.boolean,
        }
        said = field.record(readers)
        name, symbol, example = said["name"], said.pop("symbol"), said.pop("example")
        if name in self.env.known or len(self.env.known) == MAX_SIZES or len(name) > MAX_NAME:
            raise field.fail(f"two sizes are called {name[:MAX_NAME]!r}, or there are more than {MAX_SIZES}, or the name is too long")
        bounds = range_in_units(said["least"], said["most"], said["unit"], example)
        value = self.env.symbol(name, example, *bounds)
        if symbol != str(symbol_of(value)):
            raise field.fail(f"the symbol of {name!r} is {symbol_of(value)}, not {symbol!r}")
        return ProgramSize(value=value, **said)

    def read(self, field: Field) -> Any:
        """A size: a whole number, or the text of an expression in the symbols. Raises FileError for anything else."""
        if not isinstance(field.value, str):
            return field.whole()
        number = self.number(field)
        if not isinstance(number, (int, torch.SymInt)) or isinstance(number, bool):
            raise field.fail("a size is a whole number")
        if any(depends_on(number, {symbol_of(one.value)}) for one in self.ranks):
            raise field.fail("the whole size of a tensor does not depend on the rank")
        return number

    def number(self, field: Field) -> Any:
        """The symbolic number of a text."""
        text = field.text()
        if text not in self.known:
            try:
                expr = from_text(text, self.symbols)
                hint = evaluated(expr, self.example)
                self.known[text] = self.env.value(expr, hint)
            except FileError as error:
                raise field.fail(error.what, error.remedy) from None
            except Exception as error:  # sympy and torch may raise anything
                raise field.fail(f"the size {text[:60]!r} has no value at the example: {error}") from error
        return self.known[text]

    def guard(self, field: Field) -> Guard:
        return read_guard(field, {one.name for one in self.sizes}, {(one.name, one.most or 1) for one in self.ranks})


def read_guard(field: Field, names: Iterable[str], numbers: Iterable[tuple[str, int]] = ()) -> Guard:
    """Reads a guard that ``write_guards`` wrote, on the sizes ``names`` and the coordinates ``numbers`` (name, ranks); raises FileError
    for anything else."""
    readers: Readers = {"condition": Field.text, "sizes": lambda f: f.tuple_of(_named), "where": Field.text}
    said = field.record(readers, {"ranks": lambda f: f.tuple_of(_named)})
    rows, ranks = said["sizes"], said.get("ranks", ())
    try:
        condition = from_text(said["condition"], None)
    except FileError as error:
        raise field.fail(error.what, error.remedy) from None
    found = {symbol.name: symbol for symbol in condition.free_symbols}
    known = {name for name, _, _ in rows} <= set(names) and {(name, count) for name, _, count in ranks} <= set(numbers)
    named = sorted(symbol for _, symbol, _ in (*rows, *ranks))
    if not known or sorted(found) != named or not isinstance(condition, sympy.logic.boolalg.Boolean):
        raise field.fail("a guard is a condition on sizes that the program has")
    symbols, of_ranks = (tuple((name, found[symbol], number) for name, symbol, number in one) for one in (rows, ranks))
    return Guard(condition, symbols, said["where"], of_ranks)


def _count(field: Field, least: int) -> int:
    number = field.whole(least)
    if number > LARGEST:
        raise field.fail(f"a size of {number} is out of bounds")
    return number


def _place(field: Field) -> tuple[str, int]:
    path, dim = field.items(2)
    return path.text(), _count(dim, 0)


def _named(field: Field) -> tuple[str, str, int]:
    name, symbol, unit = field.items(3)
    return name.text(), symbol.text(), _count(unit, 1)


def is_number(value: Any) -> bool:
    """Whether a value in a graph is a number, concrete or symbolic."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
