"""Measures one entry on both sides."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

from bench.operators.dtensor import Theirs
from bench.operators.entries import Entry, Sample, Skipped, defined_memory, entries, entry, samples, without_frozen_seeds
from bench.operators.ours import Ours
from bench.operators.truth import Truth, first_line, truth
from bench.operators.verdict import Finding, worst

WAYS = ("forward", "backward")


def prepare() -> None:
    """Prepares a process: no warnings, and random operators without the database's fixed seeds."""
    entries()
    without_frozen_seeds()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def measure(key: str, count: int, combinations: int, sides: tuple[str, ...] = ("ours", "dtensor")) -> dict[str, Any]:
    """The record of the entry ``key``, ready for JSON."""
    start = time.process_time()
    record: dict[str, Any] = {"key": key, "caps": [count, combinations]}
    findings: dict[tuple[str, str], list[Finding]] = {(side, way): [] for side in sides for way in WAYS}
    try:
        one = entry(key, entries()[key])
        record["dtype"] = str(one.dtype).removeprefix("torch.")
        record["backward"] = one.backward
        for sample in samples(one, count, combinations):
            with defined_memory(one.info):
                _sample(one, sample, findings, record)
    except Skipped as reason:
        for listed in findings.values():
            listed.append(Finding("skipped", str(reason), 0))
    for (side, way), listed in findings.items():
        if way == "backward" and not record.get("backward", False):
            listed = [Finding("skipped", "it has no gradient", 0)]
        record.setdefault(side, {})[way] = vars(worst(listed))
    return record | {"seconds": round(time.process_time() - start, 2)}


def _sample(one: Entry, sample: Sample, findings: dict[tuple[str, str], list[Finding]], record: dict[str, Any]) -> None:
    for way in WAYS if one.backward else WAYS[:1]:
        grad = way == "backward"
        lists = {side: found for (side, w), found in findings.items() if w == way}
        try:
            right = truth(sample, grad)
        except Skipped as reason:
            for found in lists.values():
                found.append(Finding("skipped", str(reason), 0))
            continue
        if right.random:
            record["random"] = True
        if "ours" in lists:
            lists["ours"] += _ours(sample, right, grad, record)
        if "dtensor" in lists:
            lists["dtensor"] += _theirs(sample, right, grad)


def _ours(sample: Sample, right: Truth, grad: bool, record: dict[str, Any]) -> list[Finding]:
    try:
        side = Ours(sample, right, grad)
    except Exception as error:
        return [_error(error)]
    record["fallbacks"] = sorted({*record.get("fallbacks", ()), *side.fallbacks()})
    record["notes"] = sorted({*record.get("notes", ()), *side.notes()})
    return [_guarded(lambda c=c, i=i: side.run(c, sample.seed * 100 + i)) for i, c in enumerate(sample.combinations)]


def _theirs(sample: Sample, right: Truth, grad: bool) -> list[Finding]:
    side = Theirs(sample, right, grad)
    return [side.run(c) for c in sample.combinations]


def _guarded(run: Callable[[], Finding]) -> Finding:
    try:
        return run()
    except Exception as error:
        return _error(error)


def _error(error: Exception) -> Finding:
    return Finding("error", f"{type(error).__name__}: {first_line(error)}")
