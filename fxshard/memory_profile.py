"""MemoryProfile: the tensors that a device holds over time while a program runs, and the peak of their bytes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

KINDS = ("parameter", "buffer", "optimizer", "input", "gradient", "output", "mutation", "activation", "gathered", "temporary")
"""The uses of memory: inputs and outputs of the program and the optimiser's state; values saved for the backward (activation); results
of collectives (gathered); everything else (temporary)."""


@dataclass(frozen=True)
class HeldTensor:
    """One storage, shared by all views of it, alive while the steps ``birth`` to ``death`` run, both included.

    ``name``: of the parameter, input or result, else of the node that makes it; ``shape`` and ``dtype`` are those on the
    device; ``layout``: empty where it is not known; ``source``: the user's line, empty where there is none.
    """

    name: str
    kind: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    birth: int
    death: int
    layout: str = ""
    source: str = ""


@dataclass(frozen=True)
class StepRun:
    """One run of an operator. ``workspace``: bytes that it allocates and frees while it runs, besides its results."""

    name: str
    op: str
    source: str = ""
    workspace: int = 0


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on one device over the steps of a program.

    ``static``: bytes by kind that are held all the time but by no tensor of the program: the optimiser's state.
    ``unknown``: names of tensors whose size is known only at run time; they are not counted.
    """

    tensors: tuple[HeldTensor, ...]
    steps: tuple[StepRun, ...]
    static: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @cached_property
    def over_time(self) -> tuple[int, ...]:
        """Bytes alive while each step runs."""
        changes = [0] * (len(self.steps) + 1)
        for t in self.tensors:
            changes[t.birth] += t.bytes
            changes[t.death + 1] -= t.bytes
        always = sum(self.static.values())
        return tuple(always + held + s.workspace for held, s in zip(itertools.accumulate(changes), self.steps, strict=False))

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max(self.over_time, default=sum(self.static.values()))

    @cached_property
    def peak_step(self) -> int:
        """Index of the first step at which the peak is reached."""
        return self.over_time.index(self.peak) if self.steps else 0

    def alive(self, step: int | None = None) -> tuple[HeldTensor, ...]:
        """What is alive while ``step`` runs (default: at the peak), the largest first."""
        at = self.peak_step if step is None else step
        return tuple(sorted((t for t in self.tensors if t.birth <= at <= t.death), key=lambda t: -t.bytes))

    def by_kind(self, step: int | None = None) -> dict[str, int]:
        """Bytes by kind while ``step`` runs (default: at the peak), in the order of ``KINDS``; their sum is ``over_time[step]``."""
        at = self.peak_step if step is None else step
        found = Counter(self.static)
        for t in self.alive(at):
            found[t.kind] += t.bytes
        if self.steps and self.steps[at].workspace:
            found["temporary"] += self.steps[at].workspace
        return {kind: found[kind] for kind in KINDS if found[kind]}
