"""Runs all entries in two processes, resumably, with one JSON line per entry, and then writes the report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path

from bench.operators import models, rules
from bench.operators.entries import COMBINATIONS, SAMPLES, keys
from bench.operators.measure import WAYS, measure, prepare
from bench.operators.report import write_report
from bench.operators.state import Record, resumed
from bench.operators.verdict import Finding

STATE = Path(".ops")
REPORT = Path("docs/operators.md")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operators", description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples per entry")
    parser.add_argument("--combinations", type=int, default=COMBINATIONS, help="combinations of input placements per sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240, help="time limit per entry, in seconds")
    parser.add_argument("--only", help="entries whose key matches this regular expression")
    parser.add_argument("--sides", default="ours,dtensor")
    parser.add_argument("--again", action="store_true", help="discard earlier records")
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    sides = tuple(options.sides.split(","))
    if options.again:
        for state in (*(options.state / f"{side}.jsonl" for side in sides), models.STATE, rules.STATE):
            state.unlink(missing_ok=True)
    every = list(keys(options.only))
    measured = [_side(side, every, options) for side in sides]
    records = [{field: value for one in found for field, value in one.items()} for found in zip(*measured, strict=True)]
    if options.only is None:
        core, families = rules.measure(workers=options.workers), models.measure(options.workers)
        states = [*(options.state / f"{side}.jsonl" for side in sides), rules.STATE, models.STATE]
        measured = date.fromtimestamp(max(state.stat().st_mtime for state in states))
        write_report(options.report, records, options.samples, options.combinations, core, families, measured)
    return 0


def _side(side: str, every: Sequence[str], options: argparse.Namespace) -> list[Record]:
    """Runs one side alone, so that a hang there is no verdict on the other side."""
    job = partial(measure, count=options.samples, combinations=options.combinations, sides=(side,))
    path = options.state / f"{side}.jsonl"
    return resumed(path, every, job, prepare, options.workers, options.limit, partial(_lost, side=side), f"entry ({side})")


def _lost(key: str, kind: str, side: str) -> Record:
    said = "the process died" if kind == "crash" else "stopped at the time limit"
    return {"key": key, side: {way: vars(Finding(kind, said)) for way in WAYS}}
