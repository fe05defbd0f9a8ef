"""``python -m bench.regret``: the regret of the solver's plan of each model on each preset, on a mesh of dp=8,tp=8.

Prices are drawn within the errors that each preset states (docs/hardware.md). Rows are appended to ``--out`` as JSON lines, and those that
are there already are not computed again; the table has what the file has.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.quality.models import MODELS
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.mesh.price_draws import STATED
from fxshard.passes.pipeline import Compilation, Request, make_plan
from fxshard.passes.planning.price_regret.regret import regret

PRESETS, MESH = ("a100", "h100", "b200"), {"dp": 8, "tp": 8}
Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.regret", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--presets", nargs="*", choices=PRESETS, default=list(PRESETS), metavar="NAME", help=", ".join(PRESETS))
    parser.add_argument("--draws", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("regret.jsonl"), help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    found = read(chosen.out)
    for model in chosen.models:
        wanted = [preset for preset in chosen.presets if (model, preset, chosen.draws) not in found]
        graph = None
        for preset in wanted:
            row, graph = measured(model, preset, chosen.draws, graph)
            found[model, preset, chosen.draws] = row
            with chosen.out.open("a") as file:
                print(json.dumps(row), file=file, flush=True)
    keys = [key for key in product(chosen.models, chosen.presets, [chosen.draws]) if key in found]
    print(table([found[key] for key in keys]))
    return 0


def read(path: Path) -> dict[tuple[str, str, int], Row]:
    """The rows of a file; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["model"], row["preset"], row["draws"]): row for row in map(json.loads, lines)}


def measured(model: str, preset: str, draws: int, graph: PlanningGraph | None) -> tuple[Row, PlanningGraph]:
    """The row of a model on a preset, and its graph for the next preset. ``seconds``: processor time of a draw."""
    module, args, kwargs = MODELS[model]()
    made = make_plan(Compilation(Mesh(MESH, preset), Request(module, tuple(args), kwargs, cache=False), graph=graph))
    assert made.plan is not None and made.annotated is not None and made.constraints is not None and made.graph is not None
    assert made.session is not None
    start = time.process_time()
    found = regret(made.plan, made.annotated, made.constraints, None, STATED, draws, made.session.solution.choices)
    seconds = (time.process_time() - start) / draws
    row = {
        "model": model,
        "preset": preset,
        "draws": draws,
        "gap": made.plan.gap,
        "median": found.median,
        "most": found.most,
        "proven": found.proven,
        "kept": sum(loss <= 1e-9 for loss in found.losses),
        "cut": found.cut,
        "seconds": round(seconds, 3),
    }
    return row, made.graph


def table(rows: Sequence[Row]) -> str:
    headers = ("model", "preset", "draws", "best in", "loss: median", "most", "proven most", "cut", "s a draw")
    lines = [
        (
            row["model"],
            row["preset"],
            row["draws"],
            row["kept"],
            *(f"{row[name]:.2%}" for name in ("median", "most", "proven")),
            row["cut"],
            f"{row['seconds']:.2f}",
        )
        for row in rows
    ]
    return tabulate(lines, headers=headers, tablefmt="github")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
