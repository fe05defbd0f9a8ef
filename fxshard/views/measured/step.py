"""A measured step beside the predicted one: one trace for Perfetto with a process for each, and a table of both.

The measured events are those of torch.profiler's Chrome trace, as JSON objects: ``ts`` and ``dur`` in microseconds. A collective is issued
by an operator of ``_c10d_functional``, runs on a thread of the backend (gloo: an event ``gloo:all_reduce``), and ends at the latest when
``wait_tensor`` returns. Only the time in ``wait_tensor`` is time that the device loses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxshard.text_table import fitted
from fxshard.timeline import DEVICE, Timeline
from fxshard.views.measured.span_axes import ANY_AXIS, Event, Issued, span_axes
from fxshard.views.timeline import trace
from fxshard.views.words import time_text

STEP = "fxshard step"
"""The name of the range that encloses the step."""
WAIT = "_c10d_functional::wait_tensor"
SPAN = re.compile(r"(gloo|nccl|mpi|ucc):")
"""How the name of an event begins that lasts as long as a collective is under way."""


@dataclass(frozen=True)
class MeasuredStep:
    """What one rank did in one step. ``total``: microseconds; ``operators``: the thread that runs the step, and other threads, by number;
    ``under_way``, ``waits``: (axis, event) of each collective while it runs, and while the rank waits for it."""

    total: float
    operators: Mapping[int, tuple[Event, ...]]
    under_way: tuple[tuple[str, Event], ...]
    waits: tuple[tuple[str, Event], ...]

    def waited(self, axis: str | None = None) -> float:
        """Microseconds in which the rank waited for collectives on ``axis``, or for any."""
        return math.fsum(event["dur"] for name, event in self.waits if axis in (None, name))

    def communicating(self, axis: str) -> float:
        """Microseconds in which some collective on ``axis`` was under way, each counted by itself."""
        return math.fsum(event["dur"] for name, event in self.under_way if name == axis)


def measured_step(
    events: Iterable[Event], issues: Sequence[tuple[str, str]], waits: Sequence[str], operators: Iterable[str]
) -> MeasuredStep:
    """The step in a profiler's trace. ``issues``: (axis, kind) of the program's collectives in the order in which they are issued;
    ``waits``: their axes in the order in which they are waited for; ``operators``: the names of those that issue them. Raises ValueError
    without a step."""
    every = [e for e in events if e.get("ph") == "X" and isinstance(e["tid"], int)]
    step = next((e for e in every if e["name"] == STEP), None)
    if step is None:
        raise ValueError(f"the trace has no range {STEP!r}")
    start, end = step["ts"], step["ts"] + step["dur"]
    inside = [{**e, "ts": e["ts"] - start} for e in every if start <= e["ts"] <= end and e["name"] != STEP]
    inside.sort(key=lambda e: (e["ts"], -e["dur"]))
    names = set(operators)
    issued = _outermost(e for e in inside if _base(e["name"]) in names)
    waited = _outermost(e for e in inside if e["name"] == WAIT)
    spans = [e for e in inside if SPAN.match(e["name"])]
    threads: dict[int, list[Event]] = {}
    for e in inside:
        if not SPAN.match(e["name"]):
            threads.setdefault(e["tid"], []).append(e)
    first = {step["tid"]: threads.pop(step["tid"], [])}
    known = _on_axes(waited, waits)
    ends = {axis: [e["ts"] + e["dur"] for other, e in known if other == axis] for axis in set(waits)}
    shown = spans or issued
    under_way = tuple(zip(span_axes(shown, Issued(issued, issues, ends)), shown, strict=True))
    return MeasuredStep(step["dur"], {k: tuple(v) for k, v in (first | threads).items()}, under_way, known)


def backend_of(events: Iterable[Event]) -> str:
    """The backend whose collectives a profiler's trace has; ``gloo`` if it has none."""
    return next((found[1] for e in events if (found := SPAN.match(e.get("name", "")))), "gloo")


def _base(name: str) -> str:
    """The name of an operator without what its in-place and out variants append."""
    return name.removesuffix("_out").removesuffix("_")


def _outermost(events: Iterable[Event]) -> list[Event]:
    """The events that do not run inside another one of them, in order."""
    found: list[Event] = []
    for e in events:
        if not found or e["ts"] >= found[-1]["ts"] + found[-1]["dur"]:
            found.append(e)
    return found


def _on_axes(events: Sequence[Event], axes: Sequence[str]) -> tuple[tuple[str, Event], ...]:
    """Each event with its axis; without one if there are not as many as expected."""
    known = axes if len(axes) == len(events) else [ANY_AXIS] * len(events)
    return tuple(zip(known, events, strict=True))


def both_traces(predicted: Timeline, step: MeasuredStep, axes: Sequence[str], rank: int) -> dict[str, Any]:
    """One trace: process 0 is the predicted step, process 1 the measured one, and both begin at 0. Each has a lane for the device and
    one for each axis; of the measured axes, the lane shows collectives while they are under way."""
    made = trace(predicted, list(axes))
    shown = [*axes, *([ANY_AXIS] if any(axis == ANY_AXIS for axis, _ in (*step.under_way, *step.waits)) else [])]
    lanes = [DEVICE, *(f"axis {axis}" if axis != ANY_AXIS else axis for axis in shown)]
    threads = {thread: k if k == 0 else len(shown) + k for k, thread in enumerate(step.operators)}
    lanes += [f"thread {k}" for k in range(1, len(threads))]
    head = [_named("process_name", 0, f"measured step of rank {rank}"), *(_named("thread_name", k, name) for k, name in enumerate(lanes))]
    rows = [_row(e, threads[thread]) for thread, events in step.operators.items() for e in events]
    rows += [_row(e, 1 + shown.index(axis)) for axis, e in step.under_way]
    made["traceEvents"] += [*head, *rows]
    return made


def _named(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}


def _row(e: Event, lane: int) -> dict[str, Any]:
    return {
        "name": e["name"],
        "cat": e.get("cat", ""),
        "ph": "X",
        "ts": e["ts"],
        "dur": e["dur"],
        "pid": 1,
        "tid": lane,
        "args": e.get("args", {}),
    }


def both_table(predicted: Timeline, step: MeasuredStep, axes: Sequence[str]) -> str:
    """The step, its operators, and each axis: how long collectives were under way, and how long the rank waited for them."""
    rows = [("step", predicted.total, step.total), ("operators, and all else but waiting", predicted.computing, step.total - step.waited())]
    for axis in axes:
        ours = [e for e in predicted.events if e.stream == axis]
        if not (ours or any(name == axis for name, _ in (*step.under_way, *step.waits))):
            continue
        rows.append((f"collectives on {axis}: under way", math.fsum(e.end - e.start for e in ours), step.communicating(axis)))
        rows.append((f"collectives on {axis}: waited for", math.fsum(e.waited for e in ours), step.waited(axis)))
    if any(name == ANY_AXIS for name, _ in (*step.under_way, *step.waits)):
        rows.append(("collectives on an unknown axis: waited for", 0.0, step.waited(ANY_AXIS)))
    texts = [(name, time_text(a), time_text(b), f"{b / a:.2f}" if a else "") for name, a, b in rows]
    return fitted(texts, ("of one step", "predicted", "measured", "ratio"), same=False)
