"""A plan's file as a view, the version of its format, and what a program's file says besides its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxshard.errors import FileError
from fxshard.files import REMAKE, SEAL, Field, parse_json
from fxshard.size_words import expression_words, served_text
from fxshard.views.plan_view import Fields, PlanView

FORMAT, VERSION = "fxshard-plan", 7
BY_HAND = (
    f'make the plan again; one written by hand needs "format": "{FORMAT}", "version": {VERSION}, "partial": true, '
    '"mesh": {"axes": [["tp", 2]]} and "nodes": [{"name": ..., "outputs": [...]}]'
)
UNREADABLE = f"make the plan again, or read it with the fxshard that wrote it; this one reads version {VERSION}"
CHANGED = "the plan was changed after it was written: its sha256 is not that of its content"
EDITED = f'copy it again from its source; if you edited it, remove its line "{SEAL}", and it is read like a plan written by hand'

Names = Mapping[str, tuple[str, int]]
"""By the name of a symbol: a size's name and unit."""
DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ArithmeticError)
"""What views raise on fields that no plan has. ``plans/plan_json.py`` then says what is wrong, and where."""


def check_plan(root: Field, text: str | bytes) -> bool:
    """Raises FileError unless the file is a plan of this version, and what fxshard wrote if it says so by its hash. Returns whether it
    does; a plan written or edited by hand has no hash."""
    root.check_version(FORMAT, VERSION, "plan", BY_HAND, UNREADABLE)
    if SEAL not in root.value:
        return False
    root.check_seal(CHANGED, EDITED, text.encode() if isinstance(text, str) else text)
    return True


def read_view(text: bytes, where: str) -> PlanView | None:
    """The view of a plan's text; None for one without a hash, whose fields only the strict reader checks.

    Raises FileError for another format or version, and for a plan that was changed after it was written.
    """
    root = parse_json(text, where, BY_HAND)
    if not check_plan(root, text):
        return None
    return PlanView({name: value for name, value in root.value.items() if name != SEAL})


def stored_program(said: Fields) -> Fields:
    """What ``program.fields`` says of a live program, from the archive's entry ``program``. Raises one of ``DAMAGE`` for fields that no
    program has."""
    sizes = said.get("sizes", ())
    names = {one["symbol"]: (one["name"], one["unit"]) for one in sizes}
    return {
        "size_classes": len(said["classes"]),
        "by_rank": bool(said.get("by_rank")),
        **{ends: [_end(one, names) for one in said[ends]] for ends in ("inputs", "outputs")},
        "collectives": said["collectives"],
        "sizes": [_size(one) for one in sizes],
        "guards": [{"condition": _condition(one), "where": one["where"]} for one in said.get("guards", ())],
    }


def _said(text: str, names: Names) -> str:
    try:
        return expression_words(text, names)
    except (ValueError, KeyError) as error:
        what = f"the size {text[:60]!r} is no expression of the program's sizes: {error}"
        raise FileError(what, where="program", remedy=REMAKE) from None


def _end(one: Fields, names: Names) -> dict[str, Any]:
    shape = [_said(size, names) if isinstance(size, str) else size for size in one["shape"]]
    return {**{name: one[name] for name in ("kind", "name", "layout")}, "shape": shape, "dtype": one["dtype"]}


def _size(one: Fields) -> dict[str, Any]:
    """``example`` is in multiples of the unit in a file."""
    least, most, unit = one["least"], one["most"], one["unit"]
    if not all(type(number) is int and abs(number) < 2**63 for number in (least, unit, one["example"], 0 if most is None else most)):
        raise ValueError("sizes are whole numbers")
    limits = {"least": least, "most": most, "multiple_of": unit, "uneven": one["uneven"], "served": served_text(least, most, unit)}
    return {"name": one["name"], "places": one["places"], **limits, "example": one["example"] * unit}


def _condition(guard: Fields) -> str:
    names = {symbol: (name, unit) for name, symbol, unit in guard["sizes"]}
    return _said(guard["condition"], names | {symbol: (name, 1) for name, symbol, _ in guard.get("ranks", ())})
