"""``python -m bench.ablations [--data DIR]``: the effect of each mechanism: every reference problem ("anchor") as it is, and with one
mechanism switched off at a time.

Limits are on work, never on time, so that costs, bounds and work are the same on every machine. Seconds are processor time. For each figure
the table shows the smallest and the largest change over all anchors, and the anchor with the largest. DIR contains `iopddl/` and
`placement/` as for ``bench.solver``.

``--steps 20`` compares the runtime's mechanisms instead: real training steps on two gloo ranks, with and without each mechanism in turns,
as ratios (``bench.ablations.steps``).
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from bench.ablations import steps
from bench.ablations.anchors import ANCHORS, Anchor
from bench.ablations.measure import UNUSED, Cell, Figures, cells
from bench.ablations.mechanism import Mechanism, together
from bench.ablations.mechanisms import MECHANISMS
from bench.training.ours import OURS

LEAST_SECONDS = 0.5
"""Shorter times count as this one, because their differences are noise."""

CHANGES: dict[str, Callable[[Figures, Figures], float]] = {
    "cost": lambda was, now: _ratio(was.objective, now.objective),
    "gap": lambda was, now: now.gap - was.gap,
    "work": lambda was, now: _ratio(was.work, now.work),
    "seconds": lambda was, now: _ratio(max(was.seconds, LEAST_SECONDS), max(now.seconds, LEAST_SECONDS)),
    "memory": lambda was, now: _ratio(was.memory, now.memory),
}
"""The change of each figure without a mechanism; positive is worse. 0.01 is 1 % more, or one percentage point of the gap."""


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a mechanism, or a glob of them; may be repeated")
    parser.add_argument("--anchors", action="append", metavar="NAME", help="an anchor, or a glob of them; may be repeated")
    parser.add_argument("--steps", type=int, metavar="N", help="N pairs of real steps on two gloo ranks, for the stage `step`")
    parser.add_argument("--way", default="fxshard, FSDP's layouts", choices=OURS, help="the plan of these steps")
    parser.add_argument("--compiler", default="inductor", help="their compiler")
    parser.add_argument("--size", default="256/128", metavar="WIDTH/LENGTH", help="their model's width, and the length of a sequence")
    parser.add_argument("--together", action="store_true", help="switch the mechanisms of --only off at once, as one")
    parser.add_argument("--own-limits", action="store_true", help="fxshard's own limits on work, with which a cell takes up to minutes")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of published instances; left out without it")
    parser.add_argument("--runs", type=int, default=1, help="run each cell this many times, and take the fastest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each cell to a file, one line per cell")
    parser.add_argument("--read", type=Path, action="append", metavar="FILE", help="print the tables of such files; nothing is run")
    parser.add_argument("--list", action="store_true", help="list mechanisms and anchors; nothing is run")
    options = parser.parse_args(arguments)
    anchors = [a for a in ANCHORS if _named(a.name, options.anchors) and (options.data is not None or not a.needs_data)]
    anchors = [a.with_own_limits() for a in anchors] if options.own_limits else anchors
    mechanisms: Sequence[Mechanism] = [m for m in MECHANISMS if _named(m.name, options.only)]
    mechanisms = together(mechanisms) if options.together else mechanisms
    if options.steps:
        return _steps(mechanisms, options)
    if options.list:
        print(tabulate([(m.name, m.of, m.lines, m.what) for m in mechanisms], headers=("mechanism", "stage", "lines", "what it does")))
        print()
        print(tabulate([(a.name, a.of) for a in anchors], headers=("anchor", "stage")))
        return 0
    if options.read:
        found = [_read(line) for file in options.read for line in file.read_text().splitlines()]
    else:
        found = _measured(anchors, mechanisms, options.data, options.runs, options.json)
    print(tabulate([_base(cell) for cell in found if not cell.mechanism], headers=("anchor", "cost", "gap", "work", "seconds", "MB")))
    print()
    rows = [_row(mechanism, found) for mechanism in mechanisms]
    print(tabulate(rows, headers=("without", "lines", "used", *CHANGES, "no figures")))
    return 0


def _steps(mechanisms: Sequence[Mechanism], options: Any) -> int:
    width, length = map(int, options.size.split("/"))
    way = options.way, options.compiler, width, length
    found = (steps.row(steps.compared(one, way, options.steps), one.lines) for one in mechanisms if one.of == "step")
    print(tabulate(found, headers=steps.HEADERS, disable_numparse=True))
    return 0


def _named(name: str, wanted: Sequence[str] | None) -> bool:
    return wanted is None or any(fnmatch.fnmatch(name, one) for one in wanted)


def _measured(anchors: Sequence[Anchor], mechanisms: Sequence[Mechanism], data: Path | None, runs: int, file: Path | None) -> list[Cell]:
    found: list[Cell] = []
    wanted = {anchor.name: [m for m in mechanisms if m.of == anchor.of] for anchor in anchors}
    with tqdm(total=sum(1 + len(some) for some in wanted.values() if some), disable=None) as progress:
        for anchor in anchors:
            if wanted[anchor.name]:
                for cell in cells(anchor, wanted[anchor.name], data, runs):
                    found.append(cell)
                    progress.update()
                    if file is not None:
                        with file.open("a") as lines:
                            print(json.dumps(dataclasses.asdict(cell)), file=lines)
    return found


def _read(line: str) -> Cell:
    cell = json.loads(line)
    return Cell(cell["anchor"], cell["mechanism"], None if cell["figures"] is None else Figures(**cell["figures"]), cell["reason"])


def _base(cell: Cell) -> tuple[object, ...]:
    figures = cell.figures
    if figures is None:
        return cell.anchor, cell.reason
    return (
        cell.anchor,
        f"{figures.objective:,.2f}",
        f"{figures.gap:.3%}",
        f"{figures.work:.3g}",
        f"{figures.seconds:.2f}",
        figures.memory // 2**20,
    )


def _row(mechanism: Mechanism, found: Sequence[Cell]) -> tuple[object, ...]:
    """The smallest and the largest change of each figure over all anchors."""
    bases = {cell.anchor: cell.figures for cell in found if not cell.mechanism}
    own = [cell for cell in found if cell.mechanism == mechanism.name]
    pairs = [(cell.anchor, was, cell.figures) for cell in own if (was := bases.get(cell.anchor)) is not None and cell.figures is not None]
    changes = []
    for change in CHANGES.values():
        ranked = sorted((change(was, now), anchor) for anchor, was, now in pairs)
        changes.append(f"{ranked[0][0]:+.1%} to {ranked[-1][0]:+.1%} ({ranked[-1][1]})" if ranked else "")
    failed = [f"{cell.anchor}: {cell.reason}" for cell in own if cell.figures is None and cell.reason != UNUSED]
    return mechanism.name, mechanism.lines, f"{len(pairs)} of {len(own)}", *changes, "; ".join(failed)


def _ratio(was: float, now: float) -> float:
    if was == now:
        return 0.0
    return now / was - 1 if was and math.isfinite(was) else math.inf


if __name__ == "__main__":
    sys.exit(main())
