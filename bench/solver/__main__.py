"""``python -m bench.solver [--data DIR] [name ...]``: published instances, each with its time limit.

DIR (default: the value of FXSHARD_DATA) contains `iopddl/` and `placement/`; if a file is missing, its row says so. Seconds are those of
the solve alone, after reading, of wall time and of the processor; wall time beyond 105 % of the limit counts as late. A small problem is
solved first, so that loading the compiled loops is not counted. References: the optimum, or the cost of the best plan of the contest.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate
from tqdm import tqdm

from fxshard.solver import PlacementProblem, solve


@dataclass(frozen=True)
class Instance:
    """A file, the cost of its best known plan, and the time limit in seconds."""

    file: str
    reference: float
    limit: float

    @property
    def name(self) -> str:
        """The file's name without folder and extensions, as in IOPDDL's results."""
        return Path(self.file).name.split(".")[0].removeprefix("asplos-2025-iopddl-")


INSTANCES = (
    Instance("iopddl/example.json", 445, 10),
    Instance("iopddl/asplos-2025-iopddl-G.json.gz", 217_039, 10),
    Instance("iopddl/asplos-2025-iopddl-B.json.gz", 532_843, 10),
    Instance("iopddl/asplos-2025-iopddl-V.json.gz", 1_617_084, 120),
    Instance("iopddl/asplos-2025-iopddl-A.json.gz", 6_548_641_531, 60),
    Instance("iopddl/asplos-2025-iopddl-C.json.gz", 84_102_445_260, 60),
    Instance("iopddl/asplos-2025-iopddl-D.json.gz", 313_613_524_736, 90),
    Instance("iopddl/asplos-2025-iopddl-M.json.gz", 49_928_157_500, 180),
    Instance("placement/llama3-8b-8layers-8x8.json.gz", 153_376_950, 60),
)
HEADERS = ("instance", "reference", "cost", "over it", "bound", "gap", "end", "seconds", "processor", "limit")

LATE = 1.05
"""The fraction of the limit that a solve may take."""


def main(arguments: list[str]) -> int:
    """Prints the table; returns 1 if a plan is infeasible, costs less than its bound, or is late, 2 without data."""
    parser = argparse.ArgumentParser("python -m bench.solver", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="an instance (default: all)")
    parser.add_argument("--data", default=os.environ.get("FXSHARD_DATA"), metavar="DIR", help="default: FXSHARD_DATA")
    options = parser.parse_args(arguments)
    if not options.data:
        print("name the folder of the instances: --data DIR, or FXSHARD_DATA=DIR", file=sys.stderr)
        return 2
    _warm_up()
    chosen = [i for i in INSTANCES if not options.names or i.name in options.names]
    rows = [_row(instance, Path(options.data)) for instance in tqdm(chosen, disable=None)]
    print(tabulate(rows, headers=HEADERS, floatfmt=("", ",.0f", ",.0f", ".2%", ",.0f", ".2%", "", ".2f", ".2f", ".0f")))
    return int(any("wrong" in row or "late" in row for row in rows))


def _warm_up() -> None:
    """Solves a grid with memory, which loads or compiles the solver's loops."""
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(12) for j in (i + 1, i + 4) if j < 12]
    costs, tables = tuple(rng.random((12, 4))), tuple(rng.random((len(pairs), 4, 4)))
    usages, spans = tuple(rng.random((12, 4))), tuple((i, i + 4) for i in range(12))
    solve(PlacementProblem(costs, tuple(pairs), tables, usages, spans, 1.5))


def measured(name: str, data: str) -> dict[str, Any]:
    """Solves the instance of that name in the folder ``data``, after the loops were loaded."""
    instance = next(one for one in INSTANCES if one.name == name)
    _warm_up()
    return _solved(instance, Path(data))


def _solved(instance: Instance, data: Path) -> dict[str, Any]:
    problem = PlacementProblem.read(data / instance.file)
    started, used = time.perf_counter(), time.process_time()
    solution = solve(problem, time_limit=instance.limit)
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    right = problem.feasible(solution.choices) and solution.lower_bound <= problem.evaluate(solution.choices) * (1 + 1e-9)
    end = "proven" if solution.proven else "cut" if solution.cut else "open"
    end = "wrong" if not right else "late" if seconds > LATE * instance.limit else end
    found: dict[str, Any] = {
        "reference": instance.reference,
        "cost": solution.objective,
        "bound": solution.lower_bound,
        "gap": solution.gap,
    }
    return found | {"end": end, "seconds": seconds, "processor": processor, "limit": instance.limit}


def _row(instance: Instance, data: Path) -> tuple[object, ...]:
    if not (data / instance.file).is_file():
        return instance.name, instance.reference, None, None, None, None, "no such file"
    found = _solved(instance, data)
    over = f"{found['cost'] / instance.reference - 1:.2%}"
    after = (found["bound"], f"{found['gap']:.2%}", found["end"], found["seconds"], found["processor"], found["limit"])
    return instance.name, instance.reference, found["cost"], over, *after


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
