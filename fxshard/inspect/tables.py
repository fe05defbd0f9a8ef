"""A plan or a program as text, every table by tabulate."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from fxshard.inspect.data import Subject, plan_of, traffic
from fxshard.program import ProgramCollective, ShardedProgram
from fxshard.sharding_plan import PlannedCollective, ShardingPlan, by_cause


def summary(subject: Subject) -> str:
    """Mesh, objective and its proof, memory, bytes per kind of collective and axis, parameters' layouts, fallbacks."""
    plan = plan_of(subject)
    parts = [_head(subject), _traffic(subject), _parameters(plan)]
    if isinstance(subject, ShardedProgram):
        parts.append(_ends(subject))
    parts.append(_fallbacks(plan))
    return "\n\n".join(part for part in parts if part)


def nodes_table(subject: Subject) -> str:
    """One line a node: its operator, the layouts it reads and gives, global shapes, estimated microseconds."""
    rows = [
        (n.name, n.op, _join(n.spec.inputs), _join(n.spec.outputs), _join(map(_shape, n.shapes)), n.compute) for n in plan_of(subject).nodes
    ]
    return _table(rows, ("node", "operator", "reads", "gives", "shape", "us"))


def collectives_table(subject: Subject) -> str:
    """One line a collective, in order: those decided for a plan, those that run for a program, bytes sent by each rank."""
    if not subject.collectives:
        return "no collectives"
    if isinstance(subject, ShardedProgram):
        rows = [_issued(subject.plan, c) for c in subject.collectives]
        return _table(rows, ("collective", "axis", "bytes", "buffer", "dtype", "node", "for"))
    return _table([_decided(c) for c in subject.collectives], ("collective", "axis", "bytes", "buffer", "layouts", "edge"))


def _decided(c: PlannedCollective) -> tuple[Any, ...]:
    return c.kind, c.axis, c.bytes, _shape(c.buffer), f"{c.source} -> {c.target}", c.edge


def _issued(plan: ShardingPlan, c: ProgramCollective) -> tuple[Any, ...]:
    edges = {(p.entry, p.step): p.edge for p in plan.collectives}
    return c.kind, c.axis, c.bytes, _shape(c.shape), c.dtype, c.node, edges.get((c.entry, c.step), "")


def _head(subject: Subject) -> str:
    plan, c = plan_of(subject), plan_of(subject).certificate
    purpose = "forward and backward" if plan.train else "forward"
    rows = [
        ("mesh", f"{plan.mesh}, {plan.mesh.size} devices ({plan.mesh.hardware.name})"),
        ("graph", f"{purpose}, {len(plan.nodes)} nodes, hash {plan.graph_hash[:12] or 'not given'}"),
        *_proof(plan),
        *((f"memory, {kind}", size_text(size)) for kind, size in sorted(plan.memory.items())),
    ]
    if plan.memory:
        rows.append(("memory at its peak", size_text(sum(plan.memory.values()))))
    if plan.memory_limit is not None:
        rows.append(("memory limit", size_text(plan.memory_limit)))
    if isinstance(subject, ShardedProgram):
        rows.append(("local graphs", f"{len(subject.modules)}, {'shards are even' if len(subject.modules) == 1 else 'one a size class'}"))
    if c.cut:
        rows.append(("note", "the search was cut short by its time or work limit"))
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _proof(plan: ShardingPlan) -> list[tuple[str, str]]:
    if plan.partial:
        return [("objective", "none: a partial plan is a set of pins")]
    unit = plan.certificate.unit
    return [
        ("objective", f"{plan.objective:,.6g} {unit}"),
        *([("beside compute", plan.assumption)] if plan.hidden else []),
        *([("computed again", plan.repeated)] if plan.recomputed else []),
        ("lower bound", f"{plan.lower_bound:,.6g} {unit}"),
        ("gap", f"{plan.gap:.3%}"),
    ]


def _traffic(subject: Subject) -> str:
    rows = [(t.kind, t.axis, t.count, t.bytes) for t in traffic(subject)]
    return _table(rows, ("collective", "axis", "count", "bytes")) if rows else "no collectives"


def _parameters(plan: ShardingPlan) -> str:
    """One line a parameter; those whose names differ in numbers only, and that are alike, share one."""
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
            shared = "*".join(pattern) if len(by_facts) == 1 else _numbered(pattern, names)
            alike = [names[0]] if len(names) == 1 else names if shared is None else [shared]
            rows += [(name, len(names) // len(alike), *facts) for name in alike]
    return _table(rows, ("parameter", "count", "layout", "shape", "dtype")) if rows else ""


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _numbered(pattern: Sequence[str], names: Sequence[str]) -> str | None:
    """``layers.0-30,32.weight`` for names that differ in one number; None where there are several."""
    if len(pattern) != 2:
        return None
    numbers = sorted(int(_NUMBER.findall(name)[0]) for name in names)
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs).join(pattern)


def _ends(program: ShardedProgram) -> str:
    ends = [(e.kind, e.name) for e in program.inputs] + [(e.kind, e.name) for e in program.outputs]
    layouts, shapes = program.input_layouts + program.output_layouts, program.input_shapes + program.output_shapes
    triples = zip(ends, layouts, shapes, strict=True)
    rows = [(kind, name, str(layout), _shape(shape)) for (kind, name), layout, shape in triples if kind != "parameter"]
    return _table(rows, ("end", "name", "layout", "shape"))


def _fallbacks(plan: ShardingPlan) -> str:
    return "\n\n".join(_table(found, (heading, "reason")) for heading, found in by_cause(plan.fallbacks).items())


def size_text(size: int) -> str:
    """A number of bytes for people: ``1.50 GiB (1610612736 bytes)``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.2f} {unit} ({size} bytes)"
    return f"{size} bytes"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _join(values: Any) -> str:
    return ", ".join(map(str, values))


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Numbers only where the values are numbers: a name like 1e3 stays as it is."""
    numeric = ("bytes", "count", "us")
    kept = [i for i, header in enumerate(headers) if header not in numeric]
    return tabulate(rows, headers=headers, disable_numparse=kept)
