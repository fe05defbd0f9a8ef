"""Everything that a report shows, as one dict of plain data; ``static/`` has the code that draws it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxshard.inspect.data import Subject, plan_of, to_json
from fxshard.inspect.report.answers import answers_data
from fxshard.inspect.report.graph_data import GraphData, rounded
from fxshard.inspect.report.tables import Table
from fxshard.layout.redistribution import COLLECTIVES
from fxshard.memory_profile import KINDS, MemoryProfile
from fxshard.plans.explanation import Explanation
from fxshard.plans.plan_data import PlanData
from fxshard.plans.plan_text import view_of
from fxshard.program.sharded_program import ShardedProgram
from fxshard.text_table import listed
from fxshard.timeline import DEVICE, Event, Timeline
from fxshard.views.plan_view import Collective, PlanView
from fxshard.views.reasons import reason, where
from fxshard.views.screen import COSTLIEST, NAMES, grouped, head
from fxshard.views.words import alike, cost_text


@dataclass(frozen=True)
class Parts:
    """What a report shows besides the plan itself; all of it may be missing.

    ``title``: the name of the model or file. ``program``: the lowered program whose ``timeline`` is given. ``answers``: explanations of
    values. ``missing``: for a pane without data (``timeline``, ``memory``, ``alternatives``, ``graph``), why, and how to get it.
    """

    title: str = "fxshard"
    program: ShardedProgram | None = None
    timeline: Timeline | None = None
    memory: MemoryProfile | None = None
    answers: tuple[Explanation, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def report_data(subject: Subject, parts: Parts) -> dict[str, Any]:
    """The data of a report. Times are in microseconds, sizes in bytes per rank; nodes, layouts and axes are indexes into its tables."""
    plan = plan_of(subject)
    graph = GraphData(plan)
    program = subject if isinstance(subject, ShardedProgram) else parts.program
    view = view_of(plan)
    return {
        "title": parts.title,
        "mesh": {"axes": list(plan.mesh.axis_names), "shape": list(plan.mesh.shape), "hardware": plan.mesh.hardware.name},
        "train": plan.train,
        "unit": plan.certificate.unit,
        "objective": plan.objective,
        "gap": plan.gap,
        "facts": [list(row) for row in head(view)],
        "split": step_split(view),
        "memory": {"kinds": dict(plan.memory), "limit": plan.memory_limit},
        "collectives": list(COLLECTIVES),
        "costliest": [_alike(view, found, graph) for found in grouped(view)[:COSTLIEST]],
        "traffic": [list(row.values()) for row in to_json(subject)["traffic"]],
        "graph": graph.to_json(),
        "answers": answers_data(parts.answers, graph),
        "timeline": None if parts.timeline is None else timeline_data(parts.timeline, plan, program, graph),
        "profile": None if parts.memory is None else memory_data(parts.memory),
        "missing": dict(parts.missing),
    }


def step_split(view: PlanView) -> list[list[Any]]:
    """[name, cost, text]: the objective split into compute and exposed communication on each axis; the costs add up to it."""
    rows = [("compute" if view.unit == "microseconds" else "operators", view.compute), *view.exposed.items()]
    return [[name, rounded(cost), cost_text(cost, view.unit)] for name, cost in rows]


def _alike(view: PlanView, found: list[Collective], graph: GraphData) -> dict[str, Any]:
    """Collectives that are alike in several layers, as on the screen: their cost together, one's bytes, where they are and why."""
    first, places = found[0], [where(view, c) for c in found]
    cost, hidden = math.fsum(c.cost for c in found), math.fsum(c.hidden for c in found)
    names = listed(alike(place.module or "the model itself" for place in places), NAMES)
    return {
        "cost": "in compute" if first.own else cost_text(cost, view.unit) + (f" + {cost_text(hidden, view.unit)} hidden" if hidden else ""),
        "count": len(found),
        "kind": first.kind,
        "axis": first.axis,
        "bytes": first.bytes,
        "where": names + (", backward" if places[0].backward and view.train else ""),
        "why": reason(view, first),
        "node": graph.value(first.value)[0],
    }


def timeline_data(timeline: Timeline, plan: PlanData, program: ShardedProgram | None, graph: GraphData) -> dict[str, Any]:
    """``lanes``: the device, then each axis. An event is [name, operator, lane, start, duration, waited, node of the plan or -1]."""
    names: Table[str] = Table()
    operators: Table[str] = Table()
    lanes = [DEVICE, *plan.mesh.axis_names]
    served = _served(plan, program, graph)
    events = [_event(e, names, operators, lanes, served.get(e.name, graph.nodes.get(e.name, -1))) for e in timeline.events]
    return {
        "lanes": ["compute", *plan.mesh.axis_names],
        "total": timeline.total,
        "computing": timeline.computing,
        "communicating": timeline.communicating,
        "waited": timeline.waited,
        "events": events,
        "names": names.entries,
        "operators": operators.entries,
    }


def _event(e: Event, names: Table[str], operators: Table[str], lanes: list[str], node: int) -> list[Any]:
    times = [round(e.start, 3), round(e.end - e.start, 3), round(e.waited, 3)]
    return [names(e.name), operators(e.operator), lanes.index(e.stream), *times, node]


def _served(plan: PlanData, program: ShardedProgram | None, graph: GraphData) -> dict[str, int]:
    """A collective, by its name in the timeline of a program or of the plan -> the node whose value it moves."""
    found = {f"{number}: {plan.called(c.value)}": graph.value(c.value)[0] for number, c in enumerate(plan.collectives)}
    for one in program.collectives if program is not None else ():
        entries = [entry for entry, _ in one.serves]
        if entries and entries[0] < len(plan.redistributions):
            found[one.node] = graph.value(plan.redistributions[entries[0]].value)[0]
    return found


def memory_data(profile: MemoryProfile) -> dict[str, Any]:
    """A tensor is [name, kind, bytes, first step, last step, layout]; ``workspace`` is [step, bytes] where there is any."""
    names: Table[str] = Table()
    layouts: Table[str] = Table()
    kinds = list(KINDS)
    tensors = [[names(t.name), kinds.index(t.kind), t.bytes, t.birth, t.death, layouts(t.layout)] for t in profile.tensors]
    return {
        "kinds": kinds,
        "tensors": tensors,
        "names": names.entries,
        "layouts": layouts.entries,
        "steps": [step.name for step in profile.steps],
        "workspace": [[k, step.workspace] for k, step in enumerate(profile.steps) if step.workspace],
        "static": dict(profile.static),
        "peak": profile.peak,
        "peak_step": profile.peak_step,
        "unknown": list(profile.unknown),
    }
