"""Stores each record as it comes, one JSON line each, so that an interrupted run can continue."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.operators.pool import Job, run_all

Record = dict[str, Any]


def resumed(
    path: Path,
    every: Sequence[str],
    job: Job,
    setup: Callable[[], None],
    workers: int,
    limit: float,
    lost: Callable[[str, str], Record],
    unit: str,
) -> list[Record]:
    """One record per key of ``every``, in that order; records in the file at ``path`` are not made again.

    ``limit``: seconds per record; ``lost``: (key, "crash" or "time") -> the record of an entry whose process died or was stopped.
    """
    path.parent.mkdir(exist_ok=True)
    known = read_records(path)
    todo = [key for key in every if key not in known]
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(every), initial=len(every) - len(todo), unit=unit) as bar:
        for key, outcome in run_all(todo, job, setup, workers, limit):
            known[key] = record = lost(key, outcome) if isinstance(outcome, str) else outcome
            file.write(json.dumps(record) + "\n")
            file.flush()
            bar.set_postfix_str(key[:30])
            bar.update()
    return [known[key] for key in every]


def read_records(path: Path) -> dict[str, Record]:
    """Records by key; an incomplete last line is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["key"]] = record
    return found


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Replaces the file at ``path``."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
