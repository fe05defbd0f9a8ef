"""The run over all entries: resumable, two processes, one JSON line an entry, then the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.operators.entries import COMBINATIONS, SAMPLES, keys
from bench.operators.measure import WAYS, measure, prepare
from bench.operators.pool import run_all
from bench.operators.report import write_report
from bench.operators.verdict import Finding

STATE = Path(".ops/records.jsonl")
REPORT = Path("docs/operators.md")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operators", description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples an entry")
    parser.add_argument("--combinations", type=int, default=COMBINATIONS, help="combinations of input placements a sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240, help="seconds an entry may take")
    parser.add_argument("--only", help="entries whose key matches this regular expression")
    parser.add_argument("--sides", default="ours,dtensor")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    if options.again:
        options.state.unlink(missing_ok=True)
    known = read_records(options.state)
    every = list(keys(options.only))
    todo = [key for key in every if key not in known]
    job = partial(measure, count=options.samples, combinations=options.combinations, sides=tuple(options.sides.split(",")))
    options.state.parent.mkdir(exist_ok=True)
    with options.state.open("a", encoding="utf-8") as file, tqdm(total=len(every), initial=len(every) - len(todo), unit="entry") as bar:
        for key, outcome in run_all(todo, job, prepare, options.workers, options.limit):
            known[key] = record = _lost(key, outcome, options.sides.split(",")) if isinstance(outcome, str) else outcome
            file.write(json.dumps(record) + "\n")
            file.flush()
            bar.set_postfix_str(key[:30])
            bar.update()
    if options.only is None:
        write_report(options.report, [known[key] for key in every], options.samples, options.combinations)
    return 0


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key; a last line that was cut short is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["key"]] = record
    return found


def _lost(key: str, kind: str, sides: Sequence[str]) -> dict[str, Any]:
    said = "the process died" if kind == "crash" else "stopped at the time limit"
    return {"key": key, **{side: {way: vars(Finding(kind, said)) for way in WAYS} for side in sides}}
