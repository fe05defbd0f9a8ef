"""Model families, and the operators of their joint graphs that are only replicated. The records are stored like those of operators."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.families import BY_NAME
from bench.families.rows import Row, row
from bench.operators.state import Record, resumed

STATE = Path(".ops/families.jsonl")
LIMIT = 300.0


def prepare() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def measure(workers: int = 2) -> list[Row]:
    """One row per family."""
    records = resumed(STATE, list(BY_NAME), _record, prepare, workers, LIMIT, _lost, "family")
    return [Row(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items() if k != "key"}) for record in records]


def _record(name: str) -> Record:
    return {"key": name, **dataclasses.asdict(row(BY_NAME[name]))}


def _lost(name: str, outcome: str) -> Record:
    return {"key": name, **dataclasses.asdict(Row(name, BY_NAME[name].kind, reason=f"its process was lost: {outcome}"))}


def coverage(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(what, ours, DTensor's) for the table of operator coverage."""
    traced = [r for r in rows if not r.reason]
    ours, theirs = (str(sum(bool(found) for found in side)) for side in ([r.fallbacks for r in traced], [r.dtensor for r in traced]))
    what = f"of {len(traced)} model families, those with an operator that has no rule"
    return [(what, ours, theirs)]


def listed(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(what, names): families without a joint graph, and operators whose rule replicates some call."""
    whole: dict[str, Any] = {op: note for r in rows for op, note in dict(r.whole).items()}
    untraced = [(r.family, r.reason.splitlines()[0]) for r in rows if r.reason]
    return [*untraced, *((op, note or "its sizes leave nothing to shard in these models") for op, note in sorted(whole.items()))]
