"""Checks the models of the catalogue in two processes, resumably, one JSON line each, and writes docs/models.md."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from bench.models import ranks
from bench.models.check import check
from bench.models.ranks import NAMES, WAYS
from bench.models.report import failures, lines_of, rank_lines, write_report
from bench.operators.state import Record, read_records, resumed, write_records

STATE = Path(".models/simulated.jsonl")
ON_RANKS = Path(".models/on_ranks.jsonl")
REPORT = Path("docs/models.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each model; 1 if a model fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=__doc__)
    parser.add_argument("names", nargs="*", help="models of the catalogue; without names all, and the report is written")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1800, help="time limit for a model, in seconds")
    parser.add_argument("--again", action="store_true", help="discard earlier records of these models")
    parser.add_argument("--report-only", action="store_true", help="run nothing: write the report of what was measured")
    options = parser.parse_args(arguments)
    if options.report_only:
        write_report(REPORT, list(read_records(STATE).values()), list(read_records(ON_RANKS).values()))
        return 0
    prepare()
    from bench.models.catalogue import BY_NAME

    unknown = sorted(set(options.names) - set(BY_NAME))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BY_NAME)}")
    if options.again:
        for state in (STATE, ON_RANKS):
            write_records(state, [r for key, r in read_records(state).items() if options.names and key not in options.names])
    records = resumed(STATE, options.names or list(BY_NAME), check, prepare, options.workers, options.limit, _lost, "model")
    print("\n".join(lines_of(records)))
    pairs = [_on_ranks(name) for name in NAMES if not options.names or name in options.names]
    print("\n" + "\n".join(rank_lines(pairs)))
    if not options.names:
        write_report(REPORT, records, pairs)
    return int(any(map(failures, records)) or any(r[way] for r in pairs for way in WAYS))


def _on_ranks(name: str) -> Record:
    """The record of a model on two ranks, from the file if it is there."""
    record = read_records(ON_RANKS).get(name)
    if record is None:
        record = ranks.check(name)
        with ON_RANKS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return record


def prepare() -> None:
    """What a process does before it imports a model."""
    from bench.families.libraries import import_torchvision
    from bench.models.float64 import compute_in_float64

    logging.disable(logging.WARNING)
    compute_in_float64()
    import_torchvision()


def _lost(key: str, kind: str) -> Record:
    said = "the process died" if kind == "crash" else "stopped at the time limit"
    return {"key": key, "nodes": 0, "trace": 0.0, "whole": [], "error": said, "cells": []}
