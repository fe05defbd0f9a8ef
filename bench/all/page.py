"""docs/benchmarks.md: tables made from the kept figures, between markers; the prose around them stays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from bench.all import planning, plans, small, solver, steps
from bench.all.figures import Figure, Kept


def rendered(page: str, kept: Kept) -> str:
    """The page with the text between ``<!-- PART -->`` and ``<!-- end of PART -->`` made anew; raises ValueError if a marker is missing."""
    for name, text in sections(kept).items():
        places = list(re.finditer(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", page, re.DOTALL))
        if len(places) != 1:
            raise ValueError(f"the page has {len(places)} places for {name}, from <!-- {name} --> to <!-- end of {name} -->; it needs one")
        page = f"{page[: places[0].start()]}{text}\n{page[places[0].end() :]}"
    return page


def sections(kept: Kept) -> dict[str, str]:
    """The generated text of each part."""
    parts: dict[str, list[Figure]] = {}
    for one in kept.values():
        parts.setdefault(one.part, []).append(one)

    def of(*names: str) -> Sequence[Figure]:
        return [one for name in names for one in parts.get(name, [])]

    ran, evaluated = of(steps.PART), of(plans.PART)
    return {
        steps.PART: _table(steps.rows(ran), steps.HEADERS) + _lines("\nWays that did not run:\n", steps.not_run(ran)),
        planning.PART: _table(planning.rows(of(planning.PART)), planning.HEADERS),
        plans.PART: _table(plans.rows(evaluated), plans.HEADERS) + _lines("", plans.summary(evaluated)),
        solver.PART: _table(solver.rows(of(solver.PART)), solver.HEADERS),
        "small": _table(small.rows(of(small.OVERHEAD, small.MEMORY)), small.HEADERS),
    }


def update(path: Path, kept: Kept) -> None:
    path.write_text(rendered(path.read_text(encoding="utf-8"), kept), encoding="utf-8")


def _table(rows: Iterable[tuple[str, ...]], headers: tuple[str, ...]) -> str:
    found = list(rows)
    return tabulate(found, headers=headers, tablefmt="pipe", disable_numparse=True) + "\n" if found else "Not yet measured.\n"


def _lines(heading: str, lines: Iterable[str]) -> str:
    found = list(lines)
    return "\n".join((heading, *found)) + "\n" if found else ""
