"""Writes docs/models.md from the records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from bench.models.catalogue import BY_NAME
from bench.models.check import MESHES, SEEDS, TIME_LIMIT

Record = dict[str, Any]
HEADERS = ("model", "kind", "nodes", "trace, s", "plan, s", "gap, %", "plans that equal one device", "stay whole")

HEAD = """# Models

`make models` writes this page. Last measured on {day}, with torch {torch}. The models are small random ones of configs of transformers,
diffusers, torchvision, timm and peft, and of torch's own modules, in float64 without dropout. Each makes one training step (loss and all
gradients) on the simulated meshes {meshes}, under the solver's plan and {seeds} random legal plans. A plan passes if all outputs, gradients
and written buffers equal one device's to 1e-9 of their norm. Where a model casts to float32 it casts to float64 here, because sums in
another order would differ there in the seventh digit.

**{passed} of {count} models pass under all plans.** With wrong numbers: {wrong}.

- *plan, s*: the longest of the solver's three plans, beside another model on two cores, with a limit of {limit:.0f} s; *gap*: the largest.
- *stay whole*: operators that every rank computes in full, because they have no rule, or because their rule shards nothing in some call.

"""
RANKS = """## On two ranks

Two gloo processes make a training step by `fxshard.parallelize` and one through `torch.compile(backend="fxshard")`, outputs and gradients
within 1e-9 of one device, and `generate()` gives the tokens of one device after `parallelize`. Programs run eagerly, in float64.
"""


def failures(record: Record) -> list[str]:
    """What failed, one line each: where, and the first line of the error."""
    if record["error"]:
        return [f"before planning: {record['error'].splitlines()[0]}"]
    return [f"{c['mesh']}, {c['plan']}: {c['error'].splitlines()[0]}" for c in record["cells"] if c["error"]]


def is_wrong(record: Record) -> bool:
    """Whether numbers differ from one device's, as opposed to an error."""
    return any(c["error"].startswith("AssertionError") for c in record["cells"])


def lines_of(records: Sequence[Record]) -> list[str]:
    """The table, then each failure."""
    failed = [(r["key"], line) for r in records for line in failures(r)]
    return [
        tabulate([_row(r) for r in records], HEADERS, tablefmt="github", disable_numparse=True),
        "",
        *(f"- **{name}**, {line}" for name, line in failed),
    ]


def rank_lines(pairs: Sequence[Record]) -> list[str]:
    """The table of the models that ran on two ranks, then each failure."""
    ways = ("parallelize", "backend", "generate")
    rows = [(r["key"], *({"": "equal", None: ""}.get(r[way], "failed") for way in ways), f"{r['seconds']:.0f}") for r in pairs]
    failed = [f"- **{r['key']}**, {way}: {r[way]}" for r in pairs for way in ways if r[way]]
    return [tabulate(rows, ("model", *ways, "all, s"), tablefmt="github"), "", *failed]


def write_report(path: Path, records: Sequence[Record], pairs: Sequence[Record]) -> None:
    head = HEAD.format(
        day=date.today(),
        torch=torch.__version__,
        meshes=", ".join(f"`{mesh}`" for mesh in MESHES),
        seeds=len(SEEDS),
        passed=sum(not failures(r) for r in records),
        count=len(records),
        wrong=sum(map(is_wrong, records)) or "none",
        limit=TIME_LIMIT,
    )
    missing = [name for name in BY_NAME if name not in {r["key"] for r in records}]
    head += f"Not measured: {', '.join(missing)}.\n\n" if missing else ""
    text = "\n".join([*lines_of(records), "", RANKS, *rank_lines(pairs)])
    path.write_text(head + text.rstrip("\n") + "\n", encoding="utf-8")


def _row(record: Record) -> tuple[Any, ...]:
    solved = [c for c in record["cells"] if c["plan"] == "solver"]
    gaps = [c["gap"] for c in solved if c["gap"] is not None]
    right = sum(not c["error"] for c in record["cells"])
    return (
        record["key"],
        BY_NAME[record["key"]].kind,
        record["nodes"],
        f"{record['trace']:.1f}",
        f"{max((c['seconds'] for c in solved), default=0.0):.1f}",
        f"{100 * max(gaps):.2f}" if gaps else "",
        f"{right} of {len(MESHES) * (1 + len(SEEDS))}",
        ", ".join(record["whole"]),
    )
