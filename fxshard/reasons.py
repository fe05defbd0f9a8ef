"""Why a plan communicates: ``plan.why_collective`` names the ends that disagree about a layout."""

from __future__ import annotations

from dataclasses import dataclass

from fxshard.errors import PlanError
from fxshard.layout import Layout
from fxshard.plan_text import amount
from fxshard.sharding_plan import PlannedCollective, Redistribution, ShardingPlan
from fxshard.sizes import size_text
from fxshard.text_table import fitted


@dataclass(frozen=True)
class Place:
    """An end of an edge: the node and what it is, the layout that it gives or reads, the user's source line ("" where not known)."""

    node: str
    what: str
    layout: Layout
    line: str


@dataclass(frozen=True)
class CollectiveReason:
    """A collective and the two ends that it stands between. ``cost``: of its whole redistribution, which takes ``steps``, in ``unit``."""

    index: int
    collective: PlannedCollective
    producer: Place
    readers: tuple[Place, ...]
    steps: tuple[str, ...]
    cost: float
    unit: str
    remedy: str

    def __str__(self) -> str:
        c = self.collective
        head = f"collective {self.index}: {c.kind} on {c.axis}, {c.source} -> {c.target}, {size_text(c.bytes)} sent by each rank"
        rows = [("gives", *_row(self.producer)), *(("reads", *_row(reader)) for reader in self.readers)]
        whole = f"value {c.value}, {' then '.join(self.steps)}: {amount(self.cost, self.unit)} together"
        return "\n\n".join([f"{head}\n{whole}", fitted(rows, ("", "layout", "node", "is", "line"), same=False), self.remedy])


def _row(place: Place) -> tuple[str, str, str, str]:
    return str(place.layout), place.node, place.what, place.line


def why_collective(plan: ShardingPlan, index: int) -> CollectiveReason:
    """The ends that collective ``index`` of ``plan.collectives`` stands between; raises PlanError where there is none of that number."""
    count = len(plan.collectives)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        many = f"has {count}, counted from 0" if count else "has none"
        remedy = "inspect.collectives_table(plan), or `fxshard inspect PLAN.json --collectives`, lists them in order"
        raise PlanError(f"there is no collective {index!r}: the plan {many}", where=f"plan on mesh {plan.mesh}", remedy=remedy)
    collective = plan.collectives[index]
    entry = plan.redistributions[collective.entry]
    producer, readers = _producer(plan, entry), tuple(_reader(plan, entry, *reader) for reader in entry.readers)
    return CollectiveReason(
        index=index,
        collective=collective,
        producer=producer,
        readers=readers,
        steps=tuple(step.describe(plan.mesh) for step in entry.steps),
        cost=entry.cost,
        unit=plan.certificate.unit,
        remedy=_remedy(entry, producer, readers),
    )


def _producer(plan: ShardingPlan, entry: Redistribution) -> Place:
    node, _ = plan.picked.get(entry.value, (entry.value, 0))
    line = plan.lines.get(entry.value) or plan.lines.get(node, "")
    return Place(node, _what(plan, node, "one result of a node"), entry.source, line)


def _reader(plan: ShardingPlan, entry: Redistribution, node: str, operand: int) -> Place:
    if _what(plan, node, "") != "output" or operand >= len(plan.outputs):
        return Place(node, f"{_what(plan, node, 'a node')}, operand {operand}", entry.target, plan.lines.get(node, ""))
    end = plan.outputs[operand]
    return Place(node, f"{end.kind} {end.name}", entry.target, "")


def _what(plan: ShardingPlan, node: str, otherwise: str) -> str:
    """The operator, or for an input what it is and its name."""
    end = next((end for end in plan.inputs if end.node == node), None)
    if end is not None:
        return f"{end.kind} {end.name}"
    return next((n.op for n in plan.nodes if n.name == node), otherwise)


def _remedy(entry: Redistribution, producer: Place, readers: tuple[Place, ...]) -> str:
    """What would avoid it, in the words of ``explain``, which knows what that costs."""
    names = list(dict.fromkeys(reader.node for reader in readers))
    who = names[0] if len(names) == 1 else f"all of {', '.join(names)}"
    returned = any(reader.what.startswith(("output ", "gradient ", "mutation ")) for reader in readers)
    otherwise = "" if returned and entry.source.has_partial else f", or {who} read {entry.source}"
    lines = [f"It would not run if {producer.node} gave {entry.target}{otherwise}."]
    if entry.source.has_partial:
        lines.append("A sum is pending because the dim that is summed over is cut.")
    if not entry.target.has_partial:
        lines.append(f"plan.explain({entry.value!r}, {str(entry.target)!r}) says what that would cost.")
    return "\n".join(lines)
