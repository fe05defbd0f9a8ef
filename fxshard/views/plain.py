"""A plan as plain data for other programs: its file's fields and what follows from them. Bytes are per rank, times in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxshard.files import digest, write_json
from fxshard.views.plan_view import Collective, PlanView
from fxshard.views.reasons import reason, where
from fxshard.views.tables import matching, names_of

SOURCES = ("picked", "lines", "model", "modules", "reads", "results", "collectives")
"""The fields that decide nothing, which a plan's hash leaves out."""


def plan_hash(view: PlanView) -> str:
    """The plan's ``hash``."""
    return digest(write_json({name: value for name, value in view.fields.items() if name not in SOURCES}))


def plain_plan(view: PlanView, globs: Sequence[str] = ()) -> dict[str, Any]:
    """A plan as a dict for ``json.dumps``. ``globs``: only these nodes."""
    kept = matching(globs, view.nodes.items(), lambda one: names_of(view, one[0]), "node")
    return {
        "kind": "plan",
        "model": view.fields.get("model", ""),
        "mesh": {"axes": [[name, size] for name, size in view.axes.items()], "hardware": view.hardware},
        "train": view.train,
        "partial": view.partial,
        "graph_hash": view.fields.get("graph_hash", ""),
        "hash": plan_hash(view),
        "unit": view.unit,
        "objective": view.objective,
        "lower_bound": view.lower_bound,
        "gap": view.gap,
        "cut": view.cut,
        "compute": view.compute,
        "exposed": view.exposed,
        "hidden": view.hidden,
        "recomputed": [row["block"] for row in view.fields.get("recomputed", ())],
        "offloaded": [{**row, "parameter": view.called(row["node"])} for row in view.fields.get("offloaded", ())],
        "memory": dict(sorted(view.memory.items())),
        "memory_limit": view.memory_limit,
        "device_memory": view.device_memory,
        **{name: view.fields[name] for name in ("memory_sizes", "example_sizes") if name in view.fields},
        "traffic": [{"kind": kind, "axis": axis, "count": count, "bytes": size} for kind, axis, count, size in view.traffic],
        "parameters": plain_parameters(view),
        "collectives": plain_collectives(view),
        "nodes": [node for _, node in kept],
        "fallbacks": [{"node": node, "reason": said} for node, said in view.fallbacks],
    }


def plain_parameters(view: PlanView, globs: Sequence[str] = ()) -> dict[str, str]:
    """The layout of each parameter, by name."""
    held = [(node, name) for node, (kind, name) in view.inputs.items() if kind == "parameter" and node in view.nodes]
    chosen = matching(globs, held, lambda one: (one[1], one[0]), "parameter")
    return {name: view.nodes[node]["outputs"][0] for node, name in chosen}


def plain_collectives(view: PlanView, globs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The collectives, or those of matching modules or values."""
    chosen = matching(globs, view.collectives, lambda c: (where(view, c).module, *names_of(view, c.value)), "collective")
    return [plain_collective(view, c) for c in chosen]


def plain_collective(view: PlanView, c: Collective) -> dict[str, Any]:
    """A collective with its module and the reason."""
    place = where(view, c)
    figures = {"kind": c.kind, "axis": c.axis, "bytes": c.bytes, "cost": c.cost, "hidden": c.hidden, "entry": c.entry, "step": c.step}
    moved = {"value": c.value, "from": c.source, "to": c.target, "readers": [list(reader) for reader in c.readers]}
    return {**figures, **moved, "module": place.module, "backward": place.backward, "reason": reason(view, c)}
