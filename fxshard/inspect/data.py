"""A live plan or program as plain data."""

from __future__ import annotations

from typing import Any

from fxshard.plans.plan_text import view_of
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ProgramCollective, ProgramSize, ShardedProgram
from fxshard.views.plain import plain_plan
from fxshard.views.plan_view import Fields

Subject = ShardingPlan | ShardedProgram


def plan_of(subject: Subject) -> ShardingPlan:
    return subject.plan if isinstance(subject, ShardedProgram) else subject


def to_json(subject: Subject) -> dict[str, Any]:
    """A plan or a program as a dict for ``json.dumps``; bytes are per rank, times in microseconds."""
    plan = plain_plan(view_of(plan_of(subject)))
    if not isinstance(subject, ShardedProgram):
        return plan
    sent: dict[tuple[int, str], list[int]] = {}
    for c in subject.collectives:
        sent.setdefault((subject.mesh.axis(c.axis), c.kind), []).append(c.bytes)
    axes = subject.mesh.axis_names
    traffic = [{"kind": kind, "axis": axes[k], "count": len(all_), "bytes": sum(all_)} for (k, kind), all_ in sorted(sent.items())]
    return {**plan, "kind": "program", "hash": subject.hash, "traffic": traffic, **program_fields(subject)}


def program_fields(program: ShardedProgram) -> Fields:
    """What a program has besides its plan."""
    return {
        "size_classes": len(program.modules),
        "by_rank": bool(program.ranks),
        "inputs": _ends(program.inputs, program.input_layouts, map(program.named, program.input_shapes), program.input_dtypes),
        "outputs": _ends(program.outputs, program.output_layouts, map(program.named, program.output_shapes), program.output_dtypes),
        "collectives": list(map(_collective, program.collectives)),
        "sizes": list(map(_size, program.sizes)),
        "guards": [{"condition": guard.condition, "where": guard.where} for guard in program.guards],
    }


def _collective(c: ProgramCollective) -> dict[str, Any]:
    common: dict[str, Any] = {"kind": c.kind, "axis": c.axis, "bytes": c.bytes}
    return common | {"shape": list(c.shape), "dtype": c.dtype, "node": c.node, "serves": [list(pair) for pair in c.serves]}


def _size(one: ProgramSize) -> dict[str, Any]:
    places = [list(place) for place in one.places]
    limits = {"least": one.least, "most": one.most, "multiple_of": one.unit, "uneven": one.uneven, "served": one.served}
    return {"name": one.name, "places": places, **limits, "example": one.example}


def _ends(ends: Any, layouts: Any, shapes: Any, dtypes: Any) -> list[dict[str, Any]]:
    rows = zip(ends, layouts, shapes, dtypes, strict=True)
    return [{"kind": e.kind, "name": e.name, "layout": str(at), "shape": list(s), "dtype": d} for e, at, s, d in rows]
