"""A plan or a program as plain data."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from fxshard.plans.plan_data import PlannedCollective
from fxshard.plans.plan_json import write_node
from fxshard.plans.plan_sizes import write_sizes
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ProgramCollective, ProgramSize, ShardedProgram

Subject = ShardingPlan | ShardedProgram


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind on one axis: their number, and the total bytes that each rank sends."""

    kind: str
    axis: str
    count: int
    bytes: int


def plan_of(subject: Subject) -> ShardingPlan:
    return subject.plan if isinstance(subject, ShardedProgram) else subject


def kind_of(subject: Subject) -> str:
    return "program" if isinstance(subject, ShardedProgram) else "plan"


def traffic(subject: Subject) -> list[Traffic]:
    """Count and bytes per kind of collective and axis, axes in mesh order."""
    sizes: dict[tuple[int, str], list[int]] = defaultdict(list)
    mesh = plan_of(subject).mesh
    for c in subject.collectives:
        sizes[mesh.axis(c.axis), c.kind].append(c.bytes)
    return [Traffic(kind, mesh.axis_names[axis], len(all_), sum(all_)) for (axis, kind), all_ in sorted(sizes.items())]


def to_json(subject: Subject) -> dict[str, Any]:
    """A plan or a program as a dict for ``json.dumps``; bytes are per rank, times in microseconds."""
    plan = plan_of(subject)
    return {
        "kind": kind_of(subject),
        "mesh": {"axes": [[n, s] for n, s in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)], "hardware": plan.mesh.hardware.name},
        "train": plan.train,
        "partial": plan.partial,
        "graph_hash": plan.graph_hash,
        "hash": subject.hash,
        "unit": plan.certificate.unit,
        "objective": plan.objective,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "cut": plan.certificate.cut,
        "hidden": dict(plan.hidden),
        "recomputed": list(plan.recomputed),
        "offloaded": [vars(one) | {"parameter": plan.called(one.node)} for one in plan.offloaded],
        "memory": dict(sorted(plan.memory.items())),
        "memory_limit": plan.memory_limit,
        **write_sizes(plan),
        "traffic": [vars(t) for t in traffic(subject)],
        "parameters": {name: str(layout) for name, layout in plan.parameter_layouts().items()},
        "collectives": [_collective(c) for c in subject.collectives],
        "nodes": [write_node(n) for n in plan.nodes],
        "fallbacks": [{"node": node, "reason": reason} for node, reason in plan.fallbacks],
        **(_program(subject) if isinstance(subject, ShardedProgram) else {}),
    }


def _collective(c: PlannedCollective | ProgramCollective) -> dict[str, Any]:
    common: dict[str, Any] = {"kind": c.kind, "axis": c.axis, "bytes": c.bytes}
    if isinstance(c, ProgramCollective):
        return common | {"shape": list(c.shape), "dtype": c.dtype, "node": c.node, "serves": [list(pair) for pair in c.serves]}
    common |= {"entry": c.entry, "step": c.step}
    moved = {"value": c.value, "from": str(c.source), "to": str(c.target), "readers": [list(r) for r in c.readers]}
    return common | moved | {"shape": list(c.buffer), "itemsize": c.itemsize}


def _program(program: ShardedProgram) -> dict[str, Any]:
    return {
        "size_classes": len(program.modules),
        "inputs": _ends(program.inputs, program.input_layouts, map(program.named, program.input_shapes), program.input_dtypes),
        "outputs": _ends(program.outputs, program.output_layouts, map(program.named, program.output_shapes), program.output_dtypes),
        "sizes": list(map(_size, program.sizes)),
        "guards": [{"condition": guard.condition, "where": guard.where} for guard in program.guards],
    }


def _size(one: ProgramSize) -> dict[str, Any]:
    places = [list(place) for place in one.places]
    limits = {"least": one.least, "most": one.most, "multiple_of": one.unit, "uneven": one.uneven}
    return {"name": one.name, "places": places, **limits, "example": one.example}


def _ends(ends: Any, layouts: Any, shapes: Any, dtypes: Any) -> list[dict[str, Any]]:
    rows = zip(ends, layouts, shapes, dtypes, strict=True)
    return [{"kind": e.kind, "name": e.name, "layout": str(at), "shape": list(s), "dtype": d} for e, at, s, d in rows]
