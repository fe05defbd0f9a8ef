"""A live plan or program as plain data."""

from __future__ import annotations

from typing import Any

from fxshard.plans.plan_text import view_of
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.fields import program_fields
from fxshard.program.sharded_program import ShardedProgram
from fxshard.views.plain import plain_plan

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
