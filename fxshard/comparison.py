"""What is different between two plans: ``fxshard.diff``. Nodes, parameters and values are compared by name."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from fxshard.layout import Layout
from fxshard.plan_text import numbered
from fxshard.redistribution import COLLECTIVES
from fxshard.sharding_plan import OpSpec, PlannedNode, Redistribution, ShardingPlan

SHOWN = 20
"""Lines of a table; what is beyond is counted."""


@dataclass(frozen=True)
class LayoutChange:
    """A parameter's layout, or the OpSpec of a node (texts), in each plan; None where one plan has none of that name."""

    name: str
    op: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class ComputeChange:
    """Estimated microseconds of a node in each plan."""

    node: str
    op: str
    before: float
    after: float


@dataclass(frozen=True)
class Move:
    """A redistribution that only one of two plans has, or that costs something else: ``before`` and ``after`` are its costs, None
    where it is not there; ``steps`` are its collectives and other steps, ``axis: kind``."""

    value: str
    source: str
    target: str
    steps: tuple[str, ...]
    before: float | None
    after: float | None


@dataclass(frozen=True)
class TrafficChange:
    """Collectives of one kind on one axis: how many in each plan, and the bytes that each rank sends in them."""

    kind: str
    axis: str
    count: tuple[int, int]
    bytes: tuple[int, int]


@dataclass(frozen=True)
class Comparison:
    """Two plans side by side; pairs are (before, after). Everything is about what differs, so that equal plans leave it empty."""

    mesh: tuple[str, str]
    unit: tuple[str, str]
    objective: tuple[float, float]
    same_graph: bool
    memory: tuple[tuple[str, int | None, int | None], ...]
    parameters: tuple[LayoutChange, ...]
    nodes: tuple[LayoutChange, ...]
    compute: tuple[ComputeChange, ...]
    moves: tuple[Move, ...]
    traffic: tuple[TrafficChange, ...]
    hidden: tuple[tuple[str, float, float], ...] = ()
    """By kind (gathers, reductions), what each assumes to pass beside compute, which is in no cost."""
    recomputed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Blocks that each computes again in the backward."""

    @property
    def equal(self) -> bool:
        """Whether both decide the same: on one mesh, for one graph, every layout and every redistribution."""
        return self.same_graph and self.mesh[0] == self.mesh[1] and not (self.nodes or self.moves or self.compute or self.memory)

    def __str__(self) -> str:
        head = [f"{_figure(value)} {unit}" for value, unit in zip(self.objective, self.unit, strict=True)]
        if self.equal:
            return f"the plans are equal: {self.mesh[0]}, objective {head[0]}"
        rows: list[tuple[str, ...]] = [] if self.mesh[0] == self.mesh[1] else [("mesh", *self.mesh, "")]
        rows.append(("objective", *head, _difference(*self.objective) if self.unit[0] == self.unit[1] else ""))
        rows += [(f"hidden {kind}", f"{_figure(a)} us", f"{_figure(b)} us", _difference(a, b)) for kind, a, b in self.hidden]
        if self.recomputed[0] != self.recomputed[1]:
            rows.append(("computed again", *(", ".join(numbered(blocks)) or "nothing" for blocks in self.recomputed), ""))
        rows += [(f"memory, {kind}", _size(a), _size(b), _difference(a or 0, b or 0)) for kind, a, b in self.memory]
        parts = [tabulate(rows, headers=("", "before", "after", "difference"), disable_numparse=True)]
        if not self.same_graph:
            parts.insert(0, "the plans are for different graphs; what has the same name is compared")
        return "\n\n".join([*parts, *self.tables()])

    def brief(self) -> str:
        """The same in a few words: what computing takes more or less, and which collectives come and go."""
        computing = sum(c.after - c.before for c in self.compute)
        parts = [f"compute {computing:+,.4g} us"] if computing else []
        for t in self.traffic:
            count, sent = t.count[1] - t.count[0], t.bytes[1] - t.bytes[0]
            parts.append(f"{count:+d} {t.kind} on {t.axis} ({sent:+,d} bytes)" if count else f"{t.kind} on {t.axis} {sent:+,d} bytes")
        local = [m for m in self.moves if not any(step.split(": ")[1] in COLLECTIVES for step in m.steps)]
        moving = sum((m.after or 0.0) - (m.before or 0.0) for m in local)
        beside = sum(b - a for _, a, b in self.hidden)
        parts += [f"slices and copies {moving:+,.4g}"] if moving else []
        return "; ".join([*parts, *([f"hidden {beside:+,.4g} us"] if beside else [])])

    def tables(self) -> list[str]:
        """Where the difference is, a table each of what there is."""
        tables = [
            _table([(p.name, (p.before, p.after)) for p in self.parameters], ("parameter", "before", "after")),
            _table([(c.node, (c.op, c.before, c.after)) for c in self._weightiest_compute()], ("compute of", "operator", "us", "us then")),
            _table(
                [(m.value, (f"{m.source} -> {m.target}", ", ".join(m.steps), m.before, m.after)) for m in self._weightiest_moves()],
                ("redistribution of", "layouts", "steps", "cost", "cost then"),
            ),
            _table(
                [(t.kind, (t.axis, *t.count, *t.bytes, t.bytes[1] - t.bytes[0])) for t in self.traffic],
                ("collective", "axis", "count", "then", "bytes", "bytes then", "difference"),
                grouped=False,
            ),
        ]
        if not self.moves and not self.compute:  # otherwise those say enough of the nodes
            tables.insert(1, _table([(n.name, (n.op, n.before, n.after)) for n in self.nodes], ("node", "operator", "before", "after")))
        return [table for table in tables if table]

    def _weightiest_compute(self) -> list[ComputeChange]:
        return sorted(self.compute, key=lambda c: -abs(c.after - c.before))

    def _weightiest_moves(self) -> list[Move]:
        return sorted(self.moves, key=lambda m: -abs((m.after or 0.0) - (m.before or 0.0)))


def compare(before: ShardingPlan, after: ShardingPlan) -> Comparison:
    """What ``after`` does otherwise than ``before``."""
    return Comparison(
        mesh=(_mesh(before), _mesh(after)),
        unit=(before.certificate.unit, after.certificate.unit),
        objective=(before.objective, after.objective),
        same_graph=before.graph_hash == after.graph_hash and before.train == after.train,
        memory=tuple((k, *pair) for k, pair in _pairs(before.memory, after.memory) if pair[0] != pair[1]),
        parameters=_layouts(_parameters(before), _parameters(after)),
        nodes=_layouts(*({n.name: (n.op, n.spec) for n in plan.nodes} for plan in (before, after))),
        compute=_compute({n.name: n for n in before.nodes}, {n.name: n for n in after.nodes}),
        moves=_moves(before, after),
        traffic=_traffic(before, after),
        recomputed=(tuple(before.recomputed), tuple(after.recomputed)),
        hidden=tuple((kind, a or 0.0, b or 0.0) for kind, (a, b) in _pairs(before.hidden, after.hidden) if a != b),
    )


def _mesh(plan: ShardingPlan) -> str:
    return f"{plan.mesh} ({plan.mesh.hardware.name})"


def _pairs(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterable[tuple[Any, tuple[Any, Any]]]:
    """Every key with what each has, in the order of the first."""
    return [(key, (before.get(key), after.get(key))) for key in dict.fromkeys([*before, *after])]


Decided = Mapping[str, tuple[str, Layout | OpSpec]]
"""Name -> (operator, what was decided)."""


def _parameters(plan: ShardingPlan) -> Decided:
    return {name: ("parameter", layout) for name, layout in plan.parameter_layouts().items()}


def _layouts(before: Decided, after: Decided) -> tuple[LayoutChange, ...]:
    changed = [(name, a, b) for name, (a, b) in _pairs(before, after) if a != b]
    return tuple(LayoutChange(name, (a or b)[0], a and str(a[1]), b and str(b[1])) for name, a, b in changed)


def _compute(before: Mapping[str, PlannedNode], after: Mapping[str, PlannedNode]) -> tuple[ComputeChange, ...]:
    found = []
    for name, (a, b) in _pairs(before, after):
        costs = (a.compute if a else 0.0, b.compute if b else 0.0)
        if costs[0] != costs[1]:
            found.append(ComputeChange(name, (a or b).op, *costs))
    return tuple(found)


def _moves(before: ShardingPlan, after: ShardingPlan) -> tuple[Move, ...]:
    sides: list[dict[tuple[str, Layout, Layout, int], Redistribution]] = [{}, {}]
    for side, plan in zip(sides, (before, after), strict=True):
        for r in plan.redistributions:  # one that the backward does again is another
            side[r.value, r.source, r.target, int((r.value, r.source, r.target, 0) in side)] = r
    found = []
    for (value, source, target, _), (a, b) in _pairs(*sides):
        costs = (a and a.cost, b and b.cost)
        if costs[0] != costs[1]:
            found.append(Move(value, str(source), str(target), _steps(a or b, before if a else after), *costs))
    return tuple(found)


def _steps(entry: Redistribution, plan: ShardingPlan) -> tuple[str, ...]:
    return tuple(f"{plan.mesh.axis_names[step.axis]}: {step.kind}" for step in entry.steps)


def _traffic(before: ShardingPlan, after: ShardingPlan) -> tuple[TrafficChange, ...]:
    sides: list[dict[tuple[str, str], list[int]]] = [{}, {}]
    for side, plan in zip(sides, (before, after), strict=True):
        for c in plan.collectives:
            side.setdefault((c.axis, c.kind), []).append(c.bytes)
    found = []
    for (axis, kind), (a, b) in sorted(_pairs(*sides)):
        a, b = a or [], b or []
        if (len(a), sum(a)) != (len(b), sum(b)):
            found.append(TrafficChange(kind, axis, (len(a), len(b)), (sum(a), sum(b))))
    return tuple(found)


_NUMBER = re.compile(r"\d+")


def _table(rows: Sequence[tuple[str, tuple[Any, ...]]], headers: Sequence[str], grouped: bool = True) -> str:
    """Rows (name, facts); those alike but for the numbers in their names share a line that counts them."""
    if not rows:
        return ""
    alike: dict[Hashable, list[tuple[str, tuple[Any, ...]]]] = {}
    for number, row in enumerate(rows):
        alike.setdefault((_NUMBER.sub("*", row[0]), row[1]) if grouped else number, []).append(row)
    lines = []
    for found in list(alike.values())[:SHOWN]:
        name, facts = found[0]
        name = name if len(found) == 1 else f"{name} and {len(found) - 1} like it"
        lines.append((name, *(_cell(fact) for fact in facts)))
    more = sum(map(len, list(alike.values())[SHOWN:]))
    text = tabulate(lines, headers=headers, disable_numparse=True)
    return f"{text}\nand {more} more" if more else text


def _cell(fact: Any) -> str:
    if fact is None:
        return "-"
    return _figure(fact) if isinstance(fact, float) else str(fact)


def _figure(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.1f}"


def _difference(before: float, after: float) -> str:
    part = f" ({(after - before) / before:+.3%})" if before else ""
    return f"{'+' if after >= before else ''}{_figure(after - before)}{part}"


def _size(size: int | None) -> str:
    return "-" if size is None else f"{size:,} bytes"
