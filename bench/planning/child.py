"""The entry points of the measuring processes. Only these import torch, so that the parent stays small."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.planning.measure import Measured

KINDS = ("dynamo and joint export", "joint export", "make_fx")
"""The names of the traces by torch alone, ``measure.BARE``."""


def ours(
    model: str, layers: int, mesh: str, hardware: str, time_limit: float | None, lower: bool = False, words: str | None = None
) -> Measured:
    from bench.planning import measure

    return measure.ours(model, layers, mesh, hardware, time_limit, lower, words=words)


def bare(kind: str, model: str, layers: int) -> Measured:
    from bench.planning import measure

    return measure.bare(kind, model, layers)
