"""Figures of a bench: what is kept from run to run, and when a new one is a slowdown."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TIMED, COMPUTED = 0.05, 0.001
"""The least relative rise that counts, of a ratio of times and of what no clock enters."""


@dataclass(frozen=True)
class Reference:
    """What new figures are compared with: a value with its 95 % interval, and its date."""

    value: float
    low: float
    high: float
    when: str


@dataclass(frozen=True)
class Figure:
    """``value`` with its 95 % interval [low, high], or None and in ``note`` why not.

    ``goal``: the most that it should be. ``noise``: the relative rise from which it is a slowdown; None: it is not compared, because it
    depends on the machine. ``required``: having no value is a failure. ``when``: date, ``machine``: what the figures of a row can be
    compared within, ``load``: waiting processes when the cell began. ``base``: what the next figure is compared with, if not this one.
    """

    part: str
    cell: str
    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    noise: float | None = None
    note: str = ""
    required: bool = False
    when: str = ""
    machine: str = ""
    load: float = 0.0
    base: Reference | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.part, self.cell, self.name

    @property
    def reference(self) -> Reference | None:
        if self.base or self.value is None:
            return self.base
        return Reference(self.value, _end(self.low, self.value), _end(self.high, self.value), self.when)

    @property
    def misses(self) -> bool:
        return self.goal is not None and self.value is not None and self.value > self.goal


@dataclass(frozen=True)
class Cell:
    """What is measured in one go: ``run()`` gives its figures."""

    part: str
    name: str
    run: Callable[[], Iterable[Figure]]


Kept = dict[tuple[str, str, str], Figure]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median with its 95 % interval from order statistics, which assumes nothing of the distribution: least and largest up to five
    values (94 % for five)."""
    ordered, n = sorted(values), len(values)
    rank, below = 0, 0.5**n
    while rank + 1 < n / 2 and below + math.comb(n, rank + 1) * 0.5**n <= 0.025:
        rank += 1
        below += math.comb(n, rank) * 0.5**n
    return statistics.median(ordered), ordered[rank], ordered[n - 1 - rank]


def slower(new: Figure, kept: Figure | None) -> str:
    """In words, if ``new`` is a slowdown beyond noise, or "": its value is larger than the kept reference by more than ``noise``, its
    interval lies wholly above it, and both come from the same kind of machine."""
    old = _comparable(new, kept)
    if old is None or new.value is None or new.noise is None:
        return ""
    if _end(new.low, new.value) <= old.high or new.value <= old.value * (1 + new.noise):
        return ""
    return f"{new.part}, {new.cell}: {new.name} is {new.value:.4g}, on {old.when} it was {old.value:.4g}"


def following(new: Figure, kept: Figure | None) -> Figure:
    """``new`` with the kept reference, which only a figure that is faster beyond noise replaces: many small slowdowns add up."""
    old = _comparable(new, kept)
    if old is None or new.value is None or new.noise is None or new.value == old.value:
        return new
    faster = _end(new.high, new.value) < old.low and new.value < old.value * (1 - new.noise)
    return new if faster else replace(new, base=old)


def _comparable(new: Figure, kept: Figure | None) -> Reference | None:
    return None if kept is None or new.noise is None or new.machine != kept.machine else kept.reference


def broken(found: Sequence[Figure], kept: Iterable[Figure], machine: str) -> list[str]:
    """In words, what a cell ``found`` no value for though it must have one, or had one on this machine before (``kept``: the same cell)."""
    values = {one.name for one in found if one.value is not None}
    notes = {one.name: one.note for one in found}
    lost = {one.name: one for one in kept if one.name not in values and one.value is not None and one.machine in ("", machine)}
    required = {one.name: None for one in found if one.required and one.name not in values}
    texts = []
    for name in {**required, **lost}:
        before = f"; on {lost[name].when} it was {lost[name].value:.4g}" if name in lost else ""
        texts.append(f"{name} gives no value ({notes.get(name) or 'not measured any more'}){before}")
    return texts


def _end(end: float | None, value: float) -> float:
    return value if end is None else end


def read(path: Path) -> Kept:
    """The figures of a file; none if there is no file."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {one.key: one for one in map(_figure, rows)}


def _figure(row: dict[str, Any]) -> Figure:
    base = row.get("base")
    return Figure(**{**row, "base": Reference(**base) if base else None})


def write(path: Path, kept: Mapping[tuple[str, str, str], Figure]) -> None:
    """A line a figure, in a fixed order, so that differences are readable."""
    blank = asdict(Figure("", "", "", None))
    rows = [{k: v for k, v in asdict(one).items() if k == "value" or v != blank[k]} for _, one in sorted(kept.items())]
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def oldest_first(cells: Iterable[Cell], kept: Mapping[tuple[str, str, str], Figure]) -> list[Cell]:
    """Cells that were never measured, then the others by age: where time does not suffice for all, runs take turns."""
    dates: dict[tuple[str, str], str] = {}
    for one in kept.values():
        dates[one.part, one.cell] = max(one.when, dates.get((one.part, one.cell), ""))
    return sorted(cells, key=lambda cell: dates.get((cell.part, cell.name), ""))
