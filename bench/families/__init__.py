"""Tiny random models of many families, and which operators of their joint graphs have a rule: ``python -m bench.families``.

``measure`` gives a ``Row`` for each family, ``summary`` one line for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from bench.families import audio, diffusion, experts, images, own, state_space, text
from bench.families.family import Case, Family
from bench.families.rows import Row, row

FAMILIES: tuple[Family, ...] = tuple(f for module in (own, text, images, audio, experts, state_space, diffusion) for f in module.FAMILIES)
BY_NAME = {family.name: family for family in FAMILIES}


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """The family's model without dropout, in ``dtype``, its weights and inputs drawn from ``seed``."""
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        return BY_NAME[name].build(False)
    finally:
        torch.set_default_dtype(before)


def measure(names: Iterable[str] | None = None) -> list[Row]:
    """The rows of the named families, or of all."""
    return [row(family) for family in (FAMILIES if names is None else [BY_NAME[name] for name in names])]


def summary(rows: Sequence[Row]) -> str:
    """The number of families that trace, and of their distinct operators that are only replicated, by fxshard and by DTensor."""
    traced = [r for r in rows if not r.reason]
    operators = {op for r in traced for op in r.operators}
    ours = sorted({op for r in traced for op in r.fallbacks})
    whole = {op: note for r in traced for op, note in r.whole.items()}
    dtensor = sorted({op for r in traced for op in r.dtensor})
    kinds = len({r.kind for r in traced})
    return "\n".join(
        (
            f"{len(traced)} of {len(rows)} families have a joint graph, of {kinds} kinds, with {len(operators)} distinct operators",
            f"replicated because they have no rule: {len(ours)} {', '.join(ours)}",
            f"with a rule that replicates some call: {len(whole)}",
            *(f"  {op}: {note or 'no note'}" for op, note in sorted(whole.items())),
            f"unknown to DTensor: {len(dtensor)} {', '.join(dtensor)}",
            f"families with an operator that only replicates: {sum(bool(r.fallbacks) for r in traced)}, "
            f"with one unknown to DTensor: {sum(bool(r.dtensor) for r in traced)}",
        )
    )
