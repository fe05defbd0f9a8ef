"""The differences between two plans: ``fxshard.diff``. Nodes, parameters and values are compared by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxshard.byte_sizes import size_text
from fxshard.errors import count_text
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import COLLECTIVES
from fxshard.plans.plan_data import AGAIN, OpSpec, PlanData, PlannedNode, Redistribution
from fxshard.text_table import fitted
from fxshard.views.words import cost_text, merged_names, time_text

SHOWN = 10
"""Maximum number of lines in a table; the text below it counts the rest."""

BRIEF_ITEMS = 3
"""Number of differences named in a brief text."""

TIME, BYTES = "microseconds", "bytes"
ROUNDING = 1e-6
"""Microseconds or bytes within which sums may differ by rounding."""


@dataclass(frozen=True)
class LayoutChange:
    """A parameter's layout, or the OpSpec of a node (as text), in each plan; None if a plan does not have it."""

    name: str
    op: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class ComputeChange:
    """Estimated microseconds of a node in each plan, or the cost of a parameter's copies to and from the host."""

    node: str
    op: str
    before: float
    after: float


@dataclass(frozen=True)
class Move:
    """A redistribution that only one plan has, or whose costs differ: ``before`` and ``after`` are its costs, None if absent; ``steps`` are
    its steps, ``axis: kind``."""

    value: str
    source: str
    target: str
    steps: tuple[str, ...]
    before: float | None
    after: float | None


@dataclass(frozen=True)
class TrafficChange:
    """Collectives of one kind on one axis: their number in each plan, and the bytes that each rank sends."""

    kind: str
    axis: str
    count: tuple[int, int]
    bytes: tuple[int, int]


@dataclass(frozen=True)
class Comparison:
    """Two plans side by side; pairs are (before, after). Only differences are listed, so equal plans give empty fields."""

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
    """By kind (gathers, reductions), the time that each plan assumes to overlap with compute; it is not part of any cost."""
    peak: tuple[int, int] = (0, 0)
    """Peak bytes per device."""
    recomputed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Blocks that each plan recomputes in the backward."""
    offloaded: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """What each plan holds on the host, in words: ``optimizer of layers.0.weight``."""

    @property
    def equal(self) -> bool:
        """Whether both plans decide the same: same mesh and graph, and equal layouts and redistributions."""
        return (
            self.same_graph
            and self.mesh[0] == self.mesh[1]
            and not (self.nodes or self.moves or self.compute or self.memory or self._offloads)
        )

    @property
    def _offloads(self) -> bool:
        return self.offloaded[0] != self.offloaded[1]

    def __str__(self) -> str:
        head = [cost_text(value, unit) for value, unit in zip(self.objective, self.unit, strict=True)]
        if self.equal:
            return f"the plans are equal: {self.mesh[0]}, objective {head[0]}"
        rows: list[tuple[str, ...]] = [] if self.mesh[0] == self.mesh[1] else [("mesh", *self.mesh, "")]
        rows.append(("objective", *head, _change(*self.objective, self.unit[0]) if self.unit[0] == self.unit[1] else ""))
        rows += [(f"hidden {kind}", time_text(a), time_text(b), _change(a, b, TIME)) for kind, a, b in self.hidden]
        if self.recomputed[0] != self.recomputed[1]:
            rows.append(("computed again", *(", ".join(merged_names(blocks)) or "nothing" for blocks in self.recomputed), ""))
        if self._offloads:
            rows.append(("on the host", *(", ".join(merged_names(names)) or "nothing" for names in self.offloaded), ""))
        if self.peak[0] != self.peak[1]:
            rows.append(("memory", size_text(self.peak[0]), size_text(self.peak[1]), _change(*self.peak, BYTES)))
        rows += [(f"- {kind}", size_text(a or 0), size_text(b or 0), _change(a or 0, b or 0, BYTES)) for kind, a, b in self.memory]
        parts = [fitted(rows, ("", "before", "after", "difference"), same=False)]
        if not self.same_graph:
            parts.insert(0, "the plans are for different graphs; nodes with the same name are compared")
        return "\n\n".join([*parts, *self.tables()])

    def brief(self, near: Collection[str] = ()) -> str:
        """The comparison in one line: the difference for the names ``near`` ("here") and others ("elsewhere"), then the main items."""
        found = sorted(self.differences().items(), key=lambda one: -abs(one[1]))
        here, others = ([one for one in found if (one[0] in near) == side] for side in (True, False))
        sums = [f"here {self._more(sum(more for _, more in here))}"] if here else []
        sums += [f"{len(others)} elsewhere {self._more(sum(more for _, more in others))}"] if others else []
        named = [f"{name} {self._more(more)}" for name, more in others[:BRIEF_ITEMS]] + ["..."] * (len(others) > BRIEF_ITEMS)
        steps, beside = self._steps_of(near), sum(b - a for _, a, b in self.hidden)
        parts = [", ".join(sums), f"here: {steps}" if steps else "", f"elsewhere: {', '.join(named)}" if named else ""]
        return "; ".join(filter(None, [*parts, f"hidden {signed(beside, TIME)}" if abs(beside) > ROUNDING else ""]))

    def differences(self) -> dict[str, float]:
        """The difference in cost by node name, with the redistributions of the node's value; these add up to the objectives' difference."""
        found: dict[str, float] = {}
        for c in self._weightiest_compute() if self.unit[0] == TIME else ():
            found[c.node] = c.after - c.before
        for m in self.moves:
            found[m.value] = found.get(m.value, 0.0) + (m.after or 0.0) - (m.before or 0.0)
        return {name: more for name, more in found.items() if abs(more) > ROUNDING}

    def _more(self, value: float) -> str:
        return signed(value, self.unit[0])

    def _steps_of(self, names: Collection[str]) -> str:
        """The collectives that are added to or removed from the redistributions of these values."""
        count: Counter[str] = Counter()
        for m in self.moves:
            for step in m.steps if m.value in names else ():
                count[step] += (m.before is None) - (m.after is None)
        axes: dict[str, list[str]] = {}
        for step, more in sorted(count.items(), key=lambda one: (-one[1], one[0])):
            axis, kind = step.split(": ")
            if more and kind in COLLECTIVES:
                axes.setdefault(axis, []).append(f"{more:+d} {kind}")
        return ", ".join(f"{axis} {', '.join(kinds)}" for axis, kinds in sorted(axes.items()))

    def tables(self, near: Collection[str] = ()) -> list[str]:
        """One table per kind of difference: rows about the names ``near`` first, then the largest."""
        tables = [
            _table(
                [(p.name, (p.before or "-", p.after or "-")) for p in sorted(self.parameters, key=lambda p: p.name not in near)],
                ("parameter", "before", "after"),
            ),
            _table(
                [
                    (c.node, (c.op, time_text(c.before), time_text(c.after)))
                    for c in sorted(self._weightiest_compute(), key=lambda c: c.node not in near)
                ],
                ("compute of", "operator", "before", "after"),
            ),
            _table(
                [
                    (m.value, (f"{m.source} -> {m.target}", ", ".join(m.steps), *(_cost(c, self.unit[0]) for c in (m.before, m.after))))
                    for m in sorted(self.moves, key=lambda m: (m.value not in near, -abs((m.after or 0.0) - (m.before or 0.0))))
                ],
                ("redistribution of", "layouts", "steps", "before", "after"),
            ),
            _table(
                [
                    (t.kind, (t.axis, *(f"{n} ({size_text(sent)})" for n, sent in zip(t.count, t.bytes, strict=True)), _sent(t)))
                    for t in self.traffic
                ],
                ("collective", "axis", "before", "after", "difference"),
                grouped=False,
            ),
        ]
        if not self.moves and not self.compute:  # otherwise those tables cover the nodes
            rows = [(n.name, (n.op, n.before or "-", n.after or "-")) for n in self.nodes]
            tables.insert(1, _table(rows, ("node", "operator", "before", "after")))
        return [table for table in tables if table]

    def _weightiest_compute(self) -> list[ComputeChange]:
        """Nodes that run again in the backward are summed in one row; ``recomputed`` names their blocks."""
        second = [c for c in self.compute if c.node.endswith(AGAIN)]
        again = ComputeChange(f"{count_text(len(second), 'node')}, again", "", sum(c.before for c in second), sum(c.after for c in second))
        others = [c for c in self.compute if c not in second]
        return sorted([*others, *([again] if second else [])], key=lambda c: -abs(c.after - c.before))


def compare(before: PlanData, after: PlanData) -> Comparison:
    """The differences of ``after`` from ``before``."""
    return Comparison(
        mesh=(_mesh(before), _mesh(after)),
        unit=(before.certificate.unit, after.certificate.unit),
        objective=(before.objective, after.objective),
        same_graph=before.graph_hash == after.graph_hash and before.train == after.train,
        memory=tuple((k, *pair) for k, pair in _pairs(before.memory, after.memory) if pair[0] != pair[1]),
        parameters=_layouts(_parameters(before), _parameters(after)),
        nodes=_layouts(*({n.name: (n.op, n.spec) for n in plan.nodes} for plan in (before, after))),
        compute=(*_compute({n.name: n for n in before.nodes}, {n.name: n for n in after.nodes}), *_host_copies(before, after)),
        moves=_moves(before, after),
        traffic=_traffic(before, after),
        peak=(sum(before.memory.values()), sum(after.memory.values())),
        recomputed=(tuple(before.recomputed), tuple(after.recomputed)),
        offloaded=(_offloaded(before), _offloaded(after)),
        hidden=tuple((kind, a or 0.0, b or 0.0) for kind, (a, b) in _pairs(before.hidden, after.hidden) if a != b),
    )


def _offloaded(plan: PlanData) -> tuple[str, ...]:
    return tuple(f"{one.kind} of {plan.called(one.node)}" for one in plan.offloaded)


def _mesh(plan: PlanData) -> str:
    return f"{plan.mesh} ({plan.mesh.hardware.name})"


def _pairs(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterable[tuple[Any, tuple[Any, Any]]]:
    """Every key with both values, in the order of the first mapping."""
    return [(key, (before.get(key), after.get(key))) for key in dict.fromkeys([*before, *after])]


Decisions = Mapping[str, tuple[str, Layout | OpSpec]]
"""Name -> (operator, decision)."""


def _parameters(plan: PlanData) -> Decisions:
    return {name: ("parameter", layout) for name, layout in plan.parameter_layouts().items()}


def _layouts(before: Decisions, after: Decisions) -> tuple[LayoutChange, ...]:
    changed = [(name, a, b) for name, (a, b) in _pairs(before, after) if a != b]
    return tuple(LayoutChange(name, (a or b)[0], a and str(a[1]), b and str(b[1])) for name, a, b in changed)


def _compute(before: Mapping[str, PlannedNode], after: Mapping[str, PlannedNode]) -> tuple[ComputeChange, ...]:
    found = []
    for name, (a, b) in _pairs(before, after):
        costs = (a.compute if a else 0.0, b.compute if b else 0.0)
        if costs[0] != costs[1]:
            found.append(ComputeChange(name, (a or b).op, *costs))
    return tuple(found)


def _host_copies(before: PlanData, after: PlanData) -> Iterable[ComputeChange]:
    sides = ({plan.called(one.node): one.cost for one in plan.offloaded} for plan in (before, after))
    return (ComputeChange(name, "copies to the host", a or 0.0, b or 0.0) for name, (a, b) in _pairs(*sides) if a != b)


def _moves(before: PlanData, after: PlanData) -> tuple[Move, ...]:
    sides: list[dict[tuple[str, Layout, Layout, int], Redistribution]] = [{}, {}]
    for side, plan in zip(sides, (before, after), strict=True):
        for r in plan.redistributions:  # a repetition in the backward counts separately
            side[r.value, r.source, r.target, int((r.value, r.source, r.target, 0) in side)] = r
    found = []
    for (value, source, target, _), (a, b) in _pairs(*sides):
        costs = (a and a.cost, b and b.cost)
        if costs[0] != costs[1]:
            plan = before if a else after
            found.append(Move(plan.called(value), str(source), str(target), _steps(a or b, plan), *costs))
    return tuple(found)


def _steps(entry: Redistribution, plan: PlanData) -> tuple[str, ...]:
    return tuple(f"{plan.mesh.axis_names[step.axis]}: {step.kind}" for step in entry.steps)


def _traffic(before: PlanData, after: PlanData) -> tuple[TrafficChange, ...]:
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


def _table(rows: Sequence[tuple[str, tuple[str, ...]]], headers: Sequence[str], grouped: bool = True) -> str:
    """Rows (name, facts); equal rows whose names differ only in numbers share a line with their count."""
    if not rows:
        return ""
    alike: dict[Hashable, list[tuple[str, tuple[str, ...]]]] = {}
    for number, row in enumerate(rows):
        alike.setdefault((_NUMBER.sub("*", row[0]), row[1]) if grouped else number, []).append(row)
    lines = []
    for found in list(alike.values())[:SHOWN]:
        name, facts = found[0]
        lines.append((name if len(found) == 1 else f"{name} and {len(found) - 1} like it", *facts))
    more = sum(map(len, list(alike.values())[SHOWN:]))
    text = fitted(lines, headers, same=False)
    return f"{text}\nand {more} more" if more else text


def _cost(value: float | None, unit: str) -> str:
    return "-" if value is None else cost_text(value, unit)


def _sent(change: TrafficChange) -> str:
    return f"{change.count[1] - change.count[0]:+d} ({signed(change.bytes[1] - change.bytes[0], BYTES)})"


def signed(value: float, unit: str) -> str:
    """A difference with its sign: ``+4.484 ms``; ``0`` if there is none."""
    return "0" if abs(value) <= ROUNDING else f"{'+' if value > 0 else '-'}{cost_text(abs(value), unit)}"


def _change(before: float, after: float, unit: str) -> str:
    """The difference, with its ratio to ``before``."""
    if abs(after - before) <= ROUNDING or not before:
        return signed(after - before, unit)
    share = f" ({(after - before) / before:+.1%})" if abs(after) < 10 * abs(before) else f" ({after / before:.0f} times)"
    return signed(after - before, unit) + ("" if share[2:] == "0.0%)" else share)
