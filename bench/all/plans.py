"""Plan quality: the solver's plan beside known ones, by the evaluator of ``bench.quality``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from bench.all.figures import COMPUTED, Cell, Figure
from bench.fresh_process import in_fresh_process
from bench.quality.__main__ import EQUAL
from bench.quality.measure import AUTO, KNOWN, MESHES
from bench.quality.models import MODELS
from bench.quality.prices import DEVICES

PART = "quality"
OVERALL = "auto over the best known plan"
GAP, OBJECTIVE, COPIES = "gap", "evaluated over objective", "copies"


def cells(quick: bool = False) -> Iterator[Cell]:
    """A cell for each model, mesh and preset."""
    wanted = [("mlp", "8", "h100")] if quick else [(model, mesh, on) for mesh in MESHES for on in DEVICES for model in MODELS]
    for model, mesh, on in wanted:
        yield Cell(PART, f"{model}, {mesh}, {on}", partial(figures, model, mesh, on))


def evaluated(model: str, mesh: str, preset: str) -> list[dict[str, Any]]:
    """The rows of a cell; runs in a process of its own."""
    from bench.quality.measure import rows, traced

    return [row.data() for row in rows(traced(model), model, mesh, preset)]


def figures(model: str, mesh: str, preset: str) -> Iterator[Figure]:
    found = {row["plan"]: row for row in in_fresh_process(evaluated, model, mesh, preset)}
    yield from of_rows(f"{model}, {mesh}, {preset}", found)


def of_rows(cell: str, found: dict[str, dict[str, Any]]) -> Iterator[Figure]:
    """Figures of the rows of a cell, by plan."""
    auto = found[AUTO]
    if auto["failed"]:
        yield Figure(PART, cell, AUTO, None, note=auto["failed"], required=True)
        return
    times = {plan: found[plan]["total"] for plan in KNOWN if plan in found and not found[plan]["failed"]}
    yield Figure(PART, cell, AUTO, auto["total"])
    yield from (Figure(PART, cell, plan, time / auto["total"]) for plan, time in times.items())
    yield Figure(PART, cell, COPIES, auto["copies"] / auto["total"])
    yield Figure(PART, cell, OBJECTIVE, auto["total"] / auto["objective"])
    yield Figure(PART, cell, GAP, auto["gap"], noise=COMPUTED)
    if times:
        best = min(times, key=times.__getitem__)
        yield Figure(PART, cell, OVERALL, auto["total"] / times[best], goal=EQUAL, noise=COMPUTED, note=best)


HEADERS = ("model, mesh, preset", "auto us", *KNOWN, "auto's copies", "over objective")


def rows(kept: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    """Each column of a known plan is its evaluated time over that of ``auto``."""
    found = {(one.cell, one.name): one for one in kept if one.value is not None}
    for cell in (cell.name for cell in cells()):
        if (cell, AUTO) in found:
            values = {name: found[cell, name].value or 0.0 for name in (AUTO, *KNOWN, COPIES, OBJECTIVE) if (cell, name) in found}
            ratios = (f"{values[plan]:.3f}" if plan in values else "-" for plan in KNOWN)
            yield cell, f"{values[AUTO]:,.0f}", *ratios, f"{values[COPIES]:.1%}", f"{values[OBJECTIVE]:.2f}"


def summary(kept: Sequence[Figure]) -> Iterator[str]:
    """How many cells there are, and those in which a known plan is better."""
    overall = [one for one in kept if one.name == OVERALL]
    count = sum(1 for _ in cells())
    yield f"{len(overall)} of {count} cells have been run. By the evaluator, a known plan is better by more than 0.1 % in:\n"
    worse = [f"- {one.cell}: {one.note}, auto takes {one.value:.4f} of its time" for one in overall if one.misses]
    yield from worse or ["- none"]
