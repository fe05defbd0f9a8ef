"""Published instances, each within its time limit (``bench.solver``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.all.figures import Cell, Figure
from bench.fresh_process import in_fresh_process
from bench.solver.__main__ import INSTANCES, LATE, measured

PART = "solver"
COST, GAP, TIME = "cost over the best known", "gap", "seconds over the limit"
NOISE = 0.005
"""A time limit cuts a search at another place each time: the least relative rise of a cost that counts."""


def cells(data: str | None) -> Iterator[Cell]:
    """A cell for each instance whose file is in the folder ``data``."""
    for one in INSTANCES:
        if data and Path(data, one.file).is_file():
            yield Cell(PART, one.name, partial(figures, one.name, data))


def missing(data: str | None) -> list[str]:
    """The instances whose files are not there."""
    return [one.name for one in INSTANCES if not data or not Path(data, one.file).is_file()]


def figures(name: str, data: str) -> Iterator[Figure]:
    found = in_fresh_process(measured, name, data)
    yield Figure(PART, name, COST, found["cost"] / found["reference"], goal=1.01, noise=NOISE, note=found["end"])
    yield Figure(PART, name, GAP, found["gap"])
    yield Figure(PART, name, TIME, found["seconds"] / found["limit"], goal=LATE, note=f"{found['limit']:.0f} s")


HEADERS = ("instance", COST, "end", GAP, TIME, "limit", "measured", "load")


def rows(kept: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    found = {(one.cell, one.name): one for one in kept}
    for one in INSTANCES:
        if (one.name, COST) in found:
            cost, gap, time = (found[one.name, name] for name in (COST, GAP, TIME))
            values = (f"{cost.value:.4f}", cost.note, f"{gap.value:.2%}", f"{time.value:.2f}")
            yield one.name, *values, time.note, cost.when, f"{cost.load:.0f}"
