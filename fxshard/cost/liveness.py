"""Liveness of buffers: records which step makes and which steps read each buffer, and derives memory over time.

A buffer lives from the step that makes it to the last step that reads it; inputs and results live to the end.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace

from fxshard.graph.planning_graph import UNKNOWN
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun

HOST = "host"
"""The kind of an input that is not in the device's memory."""


@dataclass(frozen=True)
class BoundaryValue:
    """An input or result: its ``kind`` as in ``memory_profile.KINDS`` or ``HOST``, the user's name, its layout."""

    kind: str
    name: str
    layout: str = ""


@dataclass
class _Lifetime:
    held: HeldTensor
    stage: int
    last_stage: int
    fixed: bool


class Liveness:
    """Records buffers step by step, stage by stage. Any hashable key names a buffer; several keys may name the same one."""

    def __init__(self) -> None:
        self._all: list[_Lifetime] = []
        self._known: dict[Hashable, _Lifetime] = {}
        self._steps: list[StepRun] = []
        self._stage = -1

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def begin_stage(self, handed: Collection[Hashable] | None = None) -> None:
        """Starts a stage, which knows only the buffers that it is ``handed`` (None: all); it would have to make any other again."""
        self._stage += 1
        if handed is not None:
            self._known = {key: life for key, life in self._known.items() if key in handed}

    def step(self, run: StepRun) -> None:
        self._steps.append(run)

    @property
    def _now(self) -> int:
        return max(len(self._steps) - 1, 0)

    def add_input(self, key: Hashable, held: HeldTensor) -> None:
        """Adds an input, alive from the next step to the end."""
        if key not in self._known:
            self._add(key, replace(held, birth=len(self._steps)), fixed=True)

    def make(self, key: Hashable, held: HeldTensor) -> None:
        """Adds a buffer that the current step makes."""
        self._add(key, replace(held, birth=self._now), fixed=False)

    def _add(self, key: Hashable, held: HeldTensor, fixed: bool) -> None:
        self._known[key] = _Lifetime(replace(held, death=held.birth), self._stage, self._stage, fixed)
        self._all.append(self._known[key])

    def read(self, key: Hashable) -> None:
        """The current step reads the buffer; unknown keys are ignored."""
        life = self._known.get(key)
        if life is not None:
            life.held, life.last_stage = replace(life.held, death=self._now), self._stage

    def alias(self, key: Hashable, base: Hashable) -> None:
        """Makes ``key`` another name of the buffer ``base``."""
        if base in self._known:
            self._known[key] = self._known[base]

    def mark_result(self, key: Hashable, end: BoundaryValue) -> None:
        """Marks the buffer as a result, which lives to the end; inputs stay as they are."""
        life = self._known[key]
        if not life.fixed:
            life.fixed = True
            life.held = replace(life.held, kind=end.kind, name=end.name, layout=end.layout)

    def profile(self, static: Mapping[str, int]) -> MemoryProfile:
        steps = tuple(self._steps) or (StepRun("start", ""),)
        known = [_final(life, len(steps) - 1) for life in self._all if life.held.bytes != UNKNOWN]
        return MemoryProfile(tuple(known), steps, dict(static), tuple(x.held.name for x in self._all if x.held.bytes == UNKNOWN))


def _final(life: _Lifetime, last: int) -> HeldTensor:
    if life.fixed:
        return replace(life.held, birth=min(life.held.birth, last), death=last)
    return replace(life.held, kind="activation") if life.last_stage > life.stage else life.held
