"""``python -m bench.quality``: the solver's plan beside known plans, for each model, mesh and preset, in an independent evaluation.

Rows are appended to ``--out`` as JSON lines, and those that are there already are not computed again; the table has what the file has.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

from tabulate import tabulate

from bench.quality.measure import AUTO, KNOWN, MESHES, Row, rows, traced
from bench.quality.models import MODELS
from bench.quality.prices import DEVICES

EQUAL = 1.001
"""Totals up to this ratio count as equal: the evaluator and the prices of plans round and fuse differently."""


Cells = dict[tuple[str, str, str, str], Row]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and the known plans that are better than the solver's by more than ``EQUAL``; returns 1 if there are any.

    Those that are better only with the copies that pack values for collectives are printed and do not count.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    for name, all_of in (("models", MODELS), ("meshes", MESHES), ("presets", DEVICES)):
        parser.add_argument(f"--{name}", nargs="*", choices=list(all_of), default=list(all_of), metavar="NAME", help=", ".join(all_of))
    parser.add_argument("--out", type=Path, default=Path("quality.jsonl"), help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    found = read(chosen.out)
    for model in chosen.models:
        wanted = [(mesh, preset) for mesh, preset in product(chosen.meshes, chosen.presets) if _missing(found, model, mesh, preset)]
        graph = traced(model) if wanted else None
        for mesh, preset in wanted:
            assert graph is not None
            with chosen.out.open("a") as file:
                for row in rows(graph, model, mesh, preset, _missing(found, model, mesh, preset)):
                    found[row.key] = row
                    print(json.dumps(row.data()), file=file, flush=True)
    kept = [one for one in found.values() if one.model in chosen.models and one.mesh in chosen.meshes and one.preset in chosen.presets]
    print(table(kept))
    worse, by_copies = better(found, kept, total), better(found, kept, packed)
    print(*worse, sep="\n")
    print(*(f"with copies: {line}" for line in by_copies), sep="\n")
    return 1 if worse else 0


def better(found: Cells, kept: Iterable[Row], time: Callable[[Row | None], float]) -> list[str]:
    """Known plans that take less ``time`` than the solver's, in words."""
    said = []
    for one in kept:
        mine, auto = time(one), time(found.get((one.model, one.mesh, one.preset, AUTO)))
        if 0 < mine * EQUAL < auto:
            said.append(f"{one.model}, {one.mesh}, {one.preset}: {one.plan} takes {mine:,.1f} us, auto {auto:,.1f} us")
    return said


def read(path: Path) -> Cells:
    """The rows of a file; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row.key: row for row in (Row(**json.loads(line)) for line in lines)}


def _missing(found: Cells, model: str, mesh: str, preset: str) -> tuple[str, ...]:
    return tuple(plan for plan in (AUTO, *KNOWN) if (model, mesh, preset, plan) not in found)


def total(row: Row | None) -> float:
    """Microseconds, 0 without a plan."""
    return 0.0 if row is None or row.failed else row.total


def packed(row: Row | None) -> float:
    """Microseconds with the copies that pack values for collectives, 0 without a plan."""
    return 0.0 if row is None or row.failed else row.total + row.copies


def table(found: Iterable[Row]) -> str:
    """A line for each model, mesh and preset: auto's time, the known plans' over it, and the evaluator's time over the objective."""
    cells = {row.key: row for row in found}
    lines = []
    for place in dict.fromkeys(key[:3] for key in cells):
        auto = cells.get((*place, AUTO))
        if auto is None or auto.failed:
            continue
        others = [total(cells.get((*place, plan))) / auto.total for plan in KNOWN]
        agreement = auto.total / auto.objective if auto.objective else math.nan
        lines.append(
            (
                *place,
                f"{auto.total:,.0f}",
                *(f"{ratio:.3f}" if ratio else "-" for ratio in others),
                f"{auto.copies / auto.total:.1%}",
                f"{agreement:.2f}",
            )
        )
    return tabulate(
        lines,
        headers=("model", "mesh", "preset", "auto us", *KNOWN, "auto's copies", "over objective"),
        tablefmt="pipe",
        disable_numparse=True,
    )


if __name__ == "__main__":
    sys.exit(main())
