"""A plan or a program as text, with tables by tabulate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from fxshard.byte_sizes import size_text
from fxshard.errors import count_text
from fxshard.inspect.data import Subject, plan_of, traffic
from fxshard.plans.plan_data import PlannedCollective, by_cause
from fxshard.plans.plan_text import merged_names_with_counts, summary_rows
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ProgramCollective, ShardedProgram
from fxshard.text_table import fitted, labelled


def summary(subject: Subject) -> str:
    """Mesh, objective with its proof, memory, bytes per kind of collective and axis, layouts of parameters, fallbacks; for a program also
    its inputs and outputs, dynamic sizes and guards."""
    plan = plan_of(subject)
    parts = [_head(subject), _traffic(subject), _parameters(plan)]
    if isinstance(subject, ShardedProgram):
        parts += [_ends(subject), _sizes(subject), _guards(subject)]
    parts += [_table(found, (heading, "reason")) for heading, found in by_cause(plan.fallbacks).items()]
    return "\n\n".join(part for part in parts if part)


def nodes_table(subject: Subject) -> str:
    """One line per node: operator, input and output layouts, global shapes, estimated microseconds."""
    rows = [
        (n.name, n.op, _join(n.spec.inputs), _join(n.spec.outputs), _join(map(_shape, n.shapes)), n.compute) for n in plan_of(subject).nodes
    ]
    return _table(rows, ("node", "operator", "reads", "gives", "shape", "us"))


def collectives_table(subject: Subject) -> str:
    """One line per collective, with the bytes that each rank sends: a plan's, numbered as for ``plan.why_collective``, or a program's."""
    if not subject.collectives:
        return "no collectives"
    if isinstance(subject, ShardedProgram):
        rows = [_issued(subject.plan, c) for c in subject.collectives]
        return _table(rows, ("collective", "axis", "bytes", "buffer", "dtype", "node", "for"))
    rows = [(number, *_decided(subject, c)) for number, c in enumerate(subject.collectives)]
    return _table(rows, ("no.", "collective", "axis", "bytes", "buffer", "layouts", "edge"))


def _decided(plan: ShardingPlan, c: PlannedCollective) -> tuple[Any, ...]:
    return c.kind, c.axis, size_text(c.bytes), _shape(c.buffer), f"{c.source} -> {c.target}", _edge(plan, c)


def _edge(plan: ShardingPlan, c: PlannedCollective) -> str:
    """The edge with the user's name of an input."""
    return f"{plan.called(c.value)}{c.edge.removeprefix(c.value)}"


def _issued(plan: ShardingPlan, c: ProgramCollective) -> tuple[Any, ...]:
    edges = {(p.entry, p.step): _edge(plan, p) for p in plan.collectives}
    served = [edges.get(pair, "") for pair in c.serves]
    return (
        c.kind,
        c.axis,
        size_text(c.bytes),
        _shape(c.shape),
        c.dtype,
        c.node,
        served[0] + (f" and {len(served) - 1} more" if served[1:] else ""),
    )


def _head(subject: Subject) -> str:
    plan = plan_of(subject)
    purpose = "forward and backward" if plan.train else "forward"
    rows = [
        ("mesh", f"{plan.mesh}, {plan.mesh.size} devices ({plan.mesh.hardware.name})"),
        ("graph", f"{purpose}, {count_text(len(plan.nodes), 'node')}, hash {plan.graph_hash[:12] or 'not given'}"),
        *summary_rows(plan),
    ]
    if isinstance(subject, ShardedProgram):
        rows.append(("local graphs", f"{len(subject.modules)}, {_shared(subject)}"))
    return labelled(rows)


def _shared(program: ShardedProgram) -> str:
    """Which ranks share a local graph."""
    if len(program.modules) > 1:
        return "one per size class"
    return "for all ranks" if program.ranks else "shards are even"


def _traffic(subject: Subject) -> str:
    rows = [(t.kind, t.axis, t.count, size_text(t.bytes)) for t in traffic(subject)]
    return fitted(rows, ("collective", "axis", "count", "bytes"), same=False) if rows else "no collectives"


def _parameters(plan: ShardingPlan) -> str:
    """One line per parameter; equal ones whose names differ only in numbers share a line."""
    nodes = {n.name: n for n in plan.nodes}
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[str]]] = {}
    for end in plan.inputs:
        if end.kind == "parameter" and end.node in nodes:
            node = nodes[end.node]
            facts: tuple[str, ...] = (_join(node.spec.outputs), _join(map(_shape, node.shapes)), _join(node.dtypes))
            groups.setdefault(tuple(_NUMBER.split(end.name)), {}).setdefault(facts, []).append(end.name)
    rows: list[tuple[Any, ...]] = []
    for pattern, by_facts in groups.items():
        for facts, names in by_facts.items():
            alike = [("*".join(pattern), len(names))] if len(names) > 1 and len(by_facts) == 1 else merged_names_with_counts(names)
            rows += [(name, count, *facts) for name, count in alike]
    return _table(rows, ("parameter", "count", "layout", "shape", "dtype")) if rows else ""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _ends(program: ShardedProgram) -> str:
    ends = [(e.kind, e.name) for e in program.inputs] + [(e.kind, e.name) for e in program.outputs]
    layouts, shapes = program.input_layouts + program.output_layouts, program.input_shapes + program.output_shapes
    triples = zip(ends, layouts, shapes, strict=True)
    rows = [(kind, name, str(layout), _shape(program.named(shape))) for (kind, name), layout, shape in triples if kind != "parameter"]
    return _table(rows, ("kind", "name", "layout", "shape"))


def _sizes(program: ShardedProgram) -> str:
    """The dynamic sizes: their dims, the served range, and the example's size, to which costs and bytes refer."""
    rows = [(one.name, _join(f"dim {d} of {path}" for path, d in one.places), one.served, one.example) for one in program.sizes]
    return _table(rows, ("size", "of", "served", "in the tables")) if rows else ""


def _guards(program: ShardedProgram) -> str:
    rows = [(guard.condition, guard.where) for guard in program.guards]
    return _table(rows, ("taken for granted", "by")) if rows else ""


def _shape(shape: Sequence[int | str]) -> str:
    return ("x" if all(isinstance(size, int) for size in shape) else " x ").join(map(str, shape)) or "scalar"


def _join(values: Any) -> str:
    return ", ".join(map(str, values))


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Only the numeric columns are parsed as numbers, so that a name like 1e3 is printed as it is."""
    kept = [i for i, header in enumerate(headers) if header not in ("count", "us")]
    align = ["right" if header == "bytes" else "left" if i in kept else "decimal" for i, header in enumerate(headers)]
    return tabulate(rows, headers=headers, disable_numparse=kept, colalign=align if rows else None)
