"""Writes docs/operators.md from the records: the table, fxshard's exceptions with their reasons, DTensor's by cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from bench.families.rows import Row as Family
from bench.operators import models, rules
from bench.operators.entries import UNDEFINED, WORLDS

Record = dict[str, Any]
Row = tuple[str, str, str]
SIDES = ("ours", "dtensor")
LISTED = "Families whose joint graph could not be traced, and operators whose rule replicates some call in these models."
RAN = ("right", "wrong", "error", "no strategy", "crash", "time")


def coverage_rows(records: Sequence[Record]) -> list[Row]:
    """The numbers of right entries and of wrong answers, forward and backward, among the entries that run on one device."""
    rows: list[Row] = []
    for way in ("forward", "backward"):
        able = [r for r in records if any(r[side][way]["kind"] in RAN for side in SIDES if side in r)]
        counts = {side: Counter(r[side][way]["kind"] for r in able if side in r) for side in SIDES}
        rows.append((f"entries right, {way}", *(f"{counts[s]['right']} of {len(able)}" if counts[s] else "-" for s in SIDES)))
        rows.append((f"entries with a wrong answer, {way}", *(str(counts[s]["wrong"]) if counts[s] else "-" for s in SIDES)))
    return rows


def write_report(
    path: Path,
    records: Sequence[Record],
    samples: int,
    combinations: int,
    core: Sequence[Record],
    families: Sequence[Family],
    measured: date,
) -> None:
    """Writes the page from the ``records`` of entries in the order of torch's list, those of ``core`` operators and the rows of
    ``families``."""
    rows = [*coverage_rows(records), *rules.rows(core), *models.coverage(families)]
    parts = [
        "# Operator coverage",
        _about(records, samples, combinations, measured),
        tabulate(rows, ("", "fxshard", "DTensor"), tablefmt="github"),
        "## Failures of fxshard",
        tabulate(exceptions(records, "ours"), ("entry", "way", "verdict", "reason"), tablefmt="github"),
        "## Entries that cannot run on one device here",
        tabulate(unable(records), ("reason", "entries"), tablefmt="github"),
        "## Failures of DTensor, by cause",
        tabulate(causes(records), ("way", "cause", "entries", "for example"), tablefmt="github"),
        "## Special cases",
        _special_cases(records),
        "## Core operators that nothing shards",
        tabulate(rules.exceptions(core), ("operator", "reason"), tablefmt="github"),
        "## Core operators that could not be judged",
        tabulate(rules.not_asked(core), ("operator", "reason"), tablefmt="github"),
        "## Combinations that core operators allow and our rules do not offer",
        tabulate(rules.missing(core), ("operator", "combinations"), tablefmt="github"),
        "## Model families",
        f"{', '.join(f.family for f in families)}.\n\n{LISTED}",
        tabulate(models.listed(families), ("family or operator", "why"), tablefmt="github"),
        "## Operators that run replicated because they have no rule",
        tabulate(replicated(records), ("operator", "entries that use it"), tablefmt="github"),
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _about(records: Sequence[Record], samples: int, combinations: int, measured: date) -> str:
    return (
        f"`make ops` writes this page. Last measured on {measured}, with torch {torch.__version__}, over the {len(records)} entries of "
        f"torch's `op_db`. Each entry runs with at most {samples} samples, spread over its list, on one axis of "
        f"{' and '.join(map(str, WORLDS))} ranks in turn; shards may be uneven or empty. Each sample runs with at most {combinations} "
        "combinations of input placements (replicated, or sharded on any dim longer than 1), drawn from fixed seeds and equal for both "
        "sides, in float64 if the entry supports it. An entry is right if every combination gives the operator's result on one device, "
        "to 1e-9 of a tensor's norm; gradients are those of random tangents. fxshard draws a random legal plan for all values except the "
        "inputs. DTensor runs in LocalTensorMode; a combination that fails there runs again with one thread per rank, and that result "
        "counts."
    )


def exceptions(records: Sequence[Record], side: str) -> list[tuple[str, str, str, str]]:
    """(entry, way, verdict, reason) of all entries that ran and are not right."""
    bad = [(r["key"], way, r[side][way]) for r in records if side in r for way in ("forward", "backward")]
    return [(key, way, f["kind"], _cell(f["detail"])) for key, way, f in bad if f["kind"] in RAN and f["kind"] != "right"]


def unable(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(reason, entries) of the entries that cannot run on one device either."""
    found: dict[str, list[str]] = {}
    for record in records:
        finding = record[next(s for s in SIDES if s in record)]["forward"]
        if finding["kind"] == "skipped":
            found.setdefault(_cell(finding["detail"]), []).append(record["key"])
    return [(reason, ", ".join(keys)) for reason, keys in found.items()]


def causes(records: Sequence[Record]) -> list[tuple[str, str, int, str]]:
    """(way, cause, number of entries, a few of them); causes are errors without their numbers and names."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, way, kind, detail in exceptions(records, "dtensor"):
        cause = "no sharding strategy" if kind == "no strategy" else "wrong answer" if kind == "wrong" else _general(detail)
        found.setdefault((way, cause), []).append(key)
    order = sorted(found.items(), key=lambda item: (item[0][0] != "forward", -len(item[1]), item[0][1]))
    return [(way, cause, len(keys), ", ".join(keys[:4])) for (way, cause), keys in order]


def _general(detail: str) -> str:
    """An error message without the names and numbers that differ between operators."""
    text = re.sub(r"(aten|prims|torch)[.:]+[\w.:]+", "OPERATOR", detail)
    return re.sub(r"[\[(]?-?\d(?:[\d, x]*\d)?(?:,?[\])])?", "N", text)[:110]


def replicated(records: Sequence[Record]) -> list[tuple[str, int]]:
    counts = Counter(op for r in records for op in r.get("fallbacks", ()))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _special_cases(records: Sequence[Record]) -> str:
    random = ", ".join(r["key"] for r in records if r.get("random"))
    filled = ", ".join(sorted(UNDEFINED))
    return (
        f"Random operators (runs on one device differ from seed to seed) are compared on fxshard with the same program replicated, and on "
        f"DTensor by shape and dtype only: {random}.\n\nThese results contain uninitialised memory, which torch fills: {filled}.\n\n"
        "Results that are not unique (eigenvectors, factors of a decomposition) are compared after a function that the database defines "
        "for them."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
