"""The verdict on an entry on one side: right only if every combination tried is right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ORDER = ("wrong", "crash", "time", "error", "no strategy", "right", "skipped")
"""Verdicts, worst first: an entry gets the worst of its combinations, and is skipped only if nothing ran."""


@dataclass(frozen=True)
class Finding:
    """``kind``: one of ORDER; ``detail``: what is wrong, or why it was skipped; ``tried``: the number of combinations behind it."""

    kind: str
    detail: str = ""
    tried: int = 1


def worst(findings: Iterable[Finding]) -> Finding:
    """Combines all findings of an entry into one."""
    listed = list(findings) or [Finding("skipped", "nothing to run", 0)]
    first = min(listed, key=lambda f: ORDER.index(f.kind))
    return Finding(first.kind, first.detail, sum(f.tried for f in listed if f.kind != "skipped"))
