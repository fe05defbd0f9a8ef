"""The predicted timeline: of a plan in the order of its nodes, as a table, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fxshard.errors import count_text
from fxshard.text_table import fitted
from fxshard.timeline import DEVICE, Event, Timeline
from fxshard.views.plan_view import Collective, PlanView
from fxshard.views.reasons import reason
from fxshard.views.tables import where_text


def plan_timeline(view: PlanView) -> Timeline:
    """The plan's nodes one after another, each after the redistributions that it is the first to read. Its length is the objective: the
    device waits for what is exposed of a collective; what is hidden runs before, beside the operators."""
    now, events = 0.0, []
    before = _by_first_reader(view)
    rows: dict[int, list[Collective]] = {}
    for c in view.collectives:
        rows.setdefault(c.entry, []).append(c)
    for name, node in view.nodes.items():
        for index in before.get(name, ()):
            entry, sent = view.redistributions[index], rows.get(index, [])
            if not sent and entry["cost"]:
                events.append(Event(entry["value"], "local step", DEVICE, now, now + entry["cost"]))
                now += entry["cost"]
            for c in sent:
                events.append(Event(f"{c.number}: {view.called(c.value)}", c.kind, c.axis, max(now - c.hidden, 0.0), now + c.cost, c.cost))
                now += c.cost
        took = node.get("compute", 0.0)
        events += [Event(name, node["op"], DEVICE, now, now + took)] if took else []
        now += took
    return Timeline(tuple(events), now)


def _by_first_reader(view: PlanView) -> dict[str, list[int]]:
    """Node -> the redistributions that run before it: those that it is the first to read, and, after their producer, those without one."""
    order = {name: k for k, name in enumerate(view.nodes)}
    names = list(order)
    found: dict[str, list[int]] = {}
    for index, entry in enumerate(view.redistributions):
        readers = [order[node] for node, _ in entry["readers"] if node in order]
        made = order.get(view.producer(entry["value"]), 0)
        at = min(made + 1, len(names) - 1) if entry.get("ahead") or not readers else min(readers)
        found.setdefault(names[at], []).append(index)
    return found


def plan_trace(view: PlanView) -> dict[str, Any]:
    """The plan's timeline as a trace: an operator says its module, a collective its bytes, layouts, module and reason."""
    about = {f"{c.number}: {view.called(c.value)}": _sent(view, c) for c in view.collectives}
    for name in view.nodes:
        place = view.place(name)
        about[name] = {"module": place.module if place is not None else "", "line": view.line(name)}
    return trace(plan_timeline(view), list(view.axes), about)


def _sent(view: PlanView, c: Collective) -> dict[str, Any]:
    return {"bytes": c.bytes, "layouts": f"{c.source} -> {c.target}", "module": where_text(view, c), "reason": reason(view, c)}


def trace(timeline: Timeline, axes: list[str], about: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """A timeline in Chrome's trace format, which Perfetto reads: a lane for the device and one for each axis. ``about``: what an event says
    when it is clicked, by its name."""
    lanes = [DEVICE, *axes]
    named = {"thread_name": lanes, "process_name": ["predicted step"]}
    head = [
        {"name": kind, "ph": "M", "pid": 0, "tid": k, "args": {"name": name if kind == "process_name" or k == 0 else f"axis {name}"}}
        for kind, names in named.items()
        for k, name in enumerate(names)
    ]
    return {"traceEvents": [*head, *_events(timeline, lanes, about or {})], "displayTimeUnit": "ms"}


def _events(timeline: Timeline, lanes: list[str], about: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for e in timeline.events:
        times = {"ts": e.start, "dur": e.end - e.start}
        waited = {"waited us": e.waited} if e.waited else {}
        args = {"node": e.name, **about.get(e.name, {}), **waited}
        yield {"name": e.operator, "cat": e.stream, "ph": "X", **times, "pid": 0, "tid": lanes.index(e.stream), "args": args}


def timeline_table(timeline: Timeline, least: float = 0.0) -> str:
    """One line per event, by start; ``least``: microseconds below which operators are left out.

    ``stream``: the device, or the axis of a collective; ``waited``: microseconds for which the device waits for it.
    """
    events = sorted((e for e in timeline.events if e.stream != DEVICE or e.end - e.start >= least), key=lambda e: e.start)
    rows = [(f"{e.start:,.1f}", f"{e.end:,.1f}", e.stream, e.operator, e.name, f"{e.waited:,.1f}" if e.waited else "") for e in events]
    hidden = len(timeline.events) - len(rows)
    head = f"{timeline.total:,.1f} us: {timeline.computing:,.1f} of operators, {timeline.waited:,.1f} waited for "
    head += f"{timeline.communicating:,.1f} of collectives" + (f"; {count_text(hidden, 'short operator')} not shown" if hidden else "")
    return f"{head}\n{fitted(rows, ('start', 'end', 'stream', 'operator', 'node', 'waited'), same=False)}"
