"""Which axis each measured collective is on: gloo's spans do not name their group, and threads begin them in another order than that of
issue. A thread of the backend serves one group, though, so each thread gets an axis, such that kinds, counts and times fit the program."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
ANY_AXIS = "some axis"
"""The lane of collectives whose axis is unknown: a step that issues others than its program, or threads that fit several axes."""
MOST = 4096
"""Choices of axes for threads that are tried; with more, no axis is claimed."""


@dataclass(frozen=True)
class Issued:
    """Collectives as the rank issues them (``events``) with what the program says of each: (axis, kind). ``ends``: by axis, when each
    wait for a collective returned, in microseconds; empty if unknown."""

    events: Sequence[Event]
    program: Sequence[tuple[str, str]]
    ends: Mapping[str, Sequence[float]]

    @property
    def fits(self) -> bool:
        """Whether the rank issued the collectives of the program, as far as their names say."""
        return [family(e["name"]) for e in self.events] == [family(kind) for _, kind in self.program]


def family(name: str) -> str:
    """What a backend's name of a collective distinguishes: gloo calls a reduce-scatter all_reduce, and exchanges are all-to-alls."""
    return "reduce" if "reduce" in name else "gather" if "gather" in name else "exchange"


def span_axes(spans: Sequence[Event], issued: Issued) -> list[str]:
    """The axis of each of ``spans``, in order of their start; ``ANY_AXIS`` where the program and the times leave several, or none."""
    unknown = [ANY_AXIS] * len(spans)
    if not issued.fits:
        return unknown
    if {e["tid"] for e in spans} <= {e["tid"] for e in issued.events}:  # they begin when they are issued, as NCCL's
        same = [family(e["name"]) for e in spans] == [family(kind) for _, kind in issued.program]
        return [axis for axis, _ in issued.program] if same else unknown
    found = list(_fitting(spans, issued))
    if not found:
        return unknown
    agreed = {thread: axis for thread, axis in found[0].items() if all(other[thread] == axis for other in found)}
    return [agreed.get(e["tid"], ANY_AXIS) for e in spans]


def _fitting(spans: Sequence[Event], issued: Issued) -> Iterator[dict[Any, str]]:
    """Each choice of an axis for every thread with which the times of the spans are possible."""
    begins = _by_key(((axis, family(kind)), e["ts"]) for (axis, kind), e in zip(issued.program, issued.events, strict=True))
    threads = _by_key(((e["tid"], family(e["name"])), e["ts"]) for e in spans)
    axes = list(dict.fromkeys(axis for axis, _ in issued.program))
    possible = {
        thread: [axis for axis in axes if all(len(ts) <= len(begins.get((axis, f), ())) for (t, f), ts in threads.items() if t == thread)]
        for thread in dict.fromkeys(e["tid"] for e in spans)
    }
    choices = 1
    for some in possible.values():
        choices *= len(some)
    if choices > MOST:
        return
    for chosen in itertools.product(*possible.values()):
        axis_of = dict(zip(possible, chosen, strict=True))
        starts = _by_key(((axis_of[thread], f), t) for (thread, f), ts in threads.items() for t in ts)
        if starts.keys() == begins.keys() and all(_not_after(begins[key], starts[key]) for key in begins):
            whole = _by_key((axis, t) for (axis, _), ts in starts.items() for t in ts)
            if all(_not_after(whole[axis], ends) for axis, ends in issued.ends.items() if axis in whole and len(ends) == len(whole[axis])):
                yield axis_of


def _by_key(pairs: Iterable[tuple[Any, float]]) -> dict[Any, list[float]]:
    """The numbers of each key, in ascending order."""
    found = defaultdict[Any, list[float]](list)
    for key, number in pairs:
        found[key].append(number)
    return {key: sorted(numbers) for key, numbers in found.items()}


def _not_after(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether each of ``second`` can follow one of ``first``; both ascend."""
    return len(first) == len(second) and all(a <= b for a, b in zip(first, sorted(second), strict=True))
