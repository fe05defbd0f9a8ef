"""Lives: notes which step makes and which steps read each piece of memory, and tells what that is over time.

A piece lives from the step that makes it to the last one that reads it; what comes in or is returned stays to the end.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace

from fxshard.graph.planning_graph import UNKNOWN
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun


@dataclass(frozen=True)
class End:
    """What comes in or is returned: ``kind`` as in ``memory_profile.KINDS``, the user's name, its layout."""

    kind: str
    name: str
    layout: str = ""


@dataclass
class _Life:
    held: HeldTensor
    stage: int
    last_stage: int
    fixed: bool


class Lives:
    """Filled step by step, stage by stage; pieces are known by any keys, several for one piece if need be."""

    def __init__(self) -> None:
        self._all: list[_Life] = []
        self._known: dict[Hashable, _Life] = {}
        self._steps: list[StepRun] = []
        self._stage = -1

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    def begin_stage(self, handed: Collection[Hashable] | None = None) -> None:
        """Another stage, which knows of what there is only what it is ``handed`` (None: all): the rest it would have to make anew."""
        self._stage += 1
        if handed is not None:
            self._known = {key: life for key, life in self._known.items() if key in handed}

    def step(self, run: StepRun) -> None:
        self._steps.append(run)

    @property
    def _now(self) -> int:
        return max(len(self._steps) - 1, 0)

    def give(self, key: Hashable, held: HeldTensor) -> None:
        """A piece that comes in before the next step and stays."""
        if key not in self._known:
            self._add(key, replace(held, birth=len(self._steps)), fixed=True)

    def make(self, key: Hashable, held: HeldTensor) -> None:
        """A piece that the present step makes."""
        self._add(key, replace(held, birth=self._now), fixed=False)

    def _add(self, key: Hashable, held: HeldTensor, fixed: bool) -> None:
        self._known[key] = _Life(replace(held, death=held.birth), self._stage, self._stage, fixed)
        self._all.append(self._known[key])

    def read(self, key: Hashable) -> None:
        """The present step needs the piece; one that is not known here is not counted."""
        life = self._known.get(key)
        if life is not None:
            life.held, life.last_stage = replace(life.held, death=self._now), self._stage

    def share(self, key: Hashable, base: Hashable) -> None:
        """``key`` is another view of the piece ``base``."""
        if base in self._known:
            self._known[key] = self._known[base]

    def keep(self, key: Hashable, end: End) -> None:
        """The piece is returned."""
        life = self._known[key]
        if not life.fixed:
            life.fixed = True
            life.held = replace(life.held, kind=end.kind, name=end.name, layout=end.layout)

    def profile(self, static: Mapping[str, int]) -> MemoryProfile:
        steps = tuple(self._steps) or (StepRun("start", ""),)
        known = [_final(life, len(steps) - 1) for life in self._all if life.held.bytes != UNKNOWN]
        return MemoryProfile(tuple(known), steps, dict(static), tuple(x.held.name for x in self._all if x.held.bytes == UNKNOWN))


def _final(life: _Life, last: int) -> HeldTensor:
    if life.fixed:
        return replace(life.held, birth=min(life.held.birth, last), death=last)
    return replace(life.held, kind="activation") if life.last_stage > life.stage else life.held
