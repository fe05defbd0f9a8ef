"""Why a plan communicates: ``plan.why_collective`` names the producer and readers that disagree about a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxshard.byte_sizes import size_text
from fxshard.errors import PlanError
from fxshard.layout.layouts import Layout
from fxshard.plans.plan_data import AGAIN, PlanData, PlannedCollective, PlannedNode, Redistribution
from fxshard.plans.plan_text import earlier_redistribution
from fxshard.text_table import fitted, listed
from fxshard.views.words import NAMES_WIDTH, cost_text

ModuleOf = Callable[[str], str | None]
"""The module that returns a node's value, by the node's name; None if there is none or it is unknown."""


@dataclass(frozen=True)
class EdgeEnd:
    """An end of an edge: the node and its operator, the layout that it produces or reads, the user's source line ("" if unknown)."""

    node: str
    what: str
    layout: Layout
    line: str


@dataclass(frozen=True)
class Question:
    """A question for ``explain``: its ``name`` and ``layout`` (None: all), and what the answer is about."""

    name: str
    layout: str | None
    about: str

    def text(self, shell: bool) -> str:
        layout = self.layout
        if shell:
            return f"fxshard plan ... --explain '{self.name}{f'={layout}' if layout else ''}' {self.about}"
        return f"plan.explain({self.name!r}{f', {layout!r}' if layout else ''}) {self.about}"


@dataclass(frozen=True)
class CollectiveReason:
    """A collective and the two ends of its edge.

    ``cost``: of its whole redistribution, with these ``steps``, in ``unit``; ``name``: the user's name of the value, if any; ``repeats``: a
    sentence if the collective repeats an earlier one in the backward, else empty; ``questions``: what to ask ``explain`` next.
    """

    index: int
    collective: PlannedCollective
    producer: EdgeEnd
    readers: tuple[EdgeEnd, ...]
    steps: tuple[str, ...]
    cost: float
    unit: str
    remedy: str
    name: str = ""
    repeats: str = ""
    questions: tuple[Question, ...] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, shell: bool = False) -> str:
        """``shell``: word the questions as commands instead of calls."""
        c = self.collective
        head = [f"collective {self.index}: {c.kind} on {c.axis}, {c.source} -> {c.target}, {size_text(c.bytes)} sent by each rank"]
        named = f" ({self.name})" if self.name not in ("", c.value) else ""
        head.append(f"value {c.value}{named}, {' then '.join(self.steps)}: {cost_text(self.cost, self.unit)} together")
        head += [self.repeats] if self.repeats else []
        rows = [("gives", *_row(self.producer)), *(("reads", *_row(reader)) for reader in self.readers)]
        last = [self.remedy, *(question.text(shell) for question in self.questions)]
        return "\n\n".join(["\n".join(head), fitted(rows, ("", "layout", "node", "is", "line"), same=False), "\n".join(last)])


def _row(place: EdgeEnd) -> tuple[str, str, str, str]:
    return str(place.layout), place.node, place.what, place.line


def why_collective(plan: PlanData, index: int, module_of: ModuleOf = lambda node: None) -> CollectiveReason:
    """Why collective ``index`` of ``plan.collectives`` runs: its producer and readers. Raises PlanError if there is no such index."""
    count = len(plan.collectives)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        many = f"has {count}, counted from 0" if count else "has none"
        remedy = "fxshard.inspect.collectives_table(plan) numbers them" if count else "a plan without collectives has nothing to ask about"
        raise PlanError(f"there is no collective {index!r}: the plan {many}", where=f"plan on mesh {plan.mesh}", remedy=remedy)
    collective = plan.collectives[index]
    issuer = plan.issuer(collective.entry)
    if issuer is not None:
        return _own_reason(plan, index, issuer)
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
        name=_user_name(plan, entry.value, module_of),
        repeats=_repetition(plan, collective),
        questions=tuple(_questions(plan, entry, module_of)),
    )


def _own_reason(plan: PlanData, index: int, node: PlannedNode) -> CollectiveReason:
    """Why a node issues a collective itself."""
    collective = plan.collectives[index]
    end = EdgeEnd(node.name, node.op, collective.source, _line(plan, node.name))
    count = len(node.collectives)
    return CollectiveReason(
        index=index,
        collective=collective,
        producer=end,
        readers=(end,),
        steps=(f"{collective.step + 1} of the {count} collectives of the node itself",),
        cost=node.compute,
        unit=plan.certificate.unit,
        remedy=f"It would not run if {node.name} read an operand {collective.readers[0][1]} that is whole on {collective.axis}.",
    )


def _producer(plan: PlanData, entry: Redistribution) -> EdgeEnd:
    node, _ = plan.picked.get(entry.value, (entry.value, 0))
    return EdgeEnd(
        plan.called(node),
        _operator_or_kind(plan, node, "one result of a node"),
        entry.source,
        _line(plan, entry.value) or _line(plan, node),
    )


def _reader(plan: PlanData, entry: Redistribution, node: str, operand: int) -> EdgeEnd:
    if _operator_or_kind(plan, node, "") != "output" or operand >= len(plan.outputs):
        return EdgeEnd(node, f"{_operator_or_kind(plan, node, 'a node')}, operand {operand}", entry.target, _line(plan, node))
    end = plan.outputs[operand]
    return EdgeEnd(node, f"{end.kind} {end.name}", entry.target, "")


def _line(plan: PlanData, node: str) -> str:
    """A second run has the source line of the first."""
    return plan.lines.get(node) or plan.lines.get(node.removesuffix(AGAIN), "")


def _operator_or_kind(plan: PlanData, node: str, otherwise: str) -> str:
    """The operator, or the kind of an input."""
    return plan.kinds.get(node) or next((n.op for n in plan.nodes if n.name == node), otherwise)


def _repetition(plan: PlanData, collective: PlannedCollective) -> str:
    """A sentence if the collective repeats an earlier one, or belongs to a node's second run; else empty."""
    entry = plan.redistributions[collective.entry]
    first = earlier_redistribution(plan).get(collective.entry)
    if first is None and not entry.value.endswith(AGAIN):
        return ""
    same = next((k for k, c in enumerate(plan.collectives) if (c.entry, c.step) == (first, collective.step)), None)
    done = "" if same is None else f"; collective {same} is the first time"
    if entry.value.endswith(AGAIN):
        return f"the backward computes this block again instead of keeping its values{done}"
    return f"the backward repeats what the forward did instead of keeping the result{done}"


def _remedy(entry: Redistribution, producer: EdgeEnd, readers: tuple[EdgeEnd, ...]) -> str:
    names = list(dict.fromkeys(reader.node for reader in readers))
    who = names[0] if len(names) == 1 else f"all of {listed(names, NAMES_WIDTH)}"
    returned = any(reader.what.startswith(("output ", "gradient ", "mutation ")) for reader in readers)
    otherwise = "" if returned and entry.source.has_partial else f", or {who} read {entry.source}"
    lines = [f"It would not run if {producer.node} gave {entry.target}{otherwise}."]
    if entry.source.has_partial:
        lines.append("A sum is pending because the dim that is summed over is sharded.")
    return "\n".join(lines)


def _questions(plan: PlanData, entry: Redistribution, module_of: ModuleOf) -> list[Question]:
    """Questions for ``explain``, which computes the cost of avoiding the collective; for a gradient, the parameter's layout comes first."""
    ends = [plan.outputs[k] for node, k in entry.readers if _operator_or_kind(plan, node, "") == "output" and k < len(plan.outputs)]
    about = "says what other layouts of it, and so of its gradient, would cost."
    found = [Question(end.name, None, about) for end in ends if end.kind == "gradient"]
    if not entry.target.has_partial:
        found.append(Question(_user_name(plan, entry.value, module_of), str(entry.target), "says what that would cost."))
    return found


def _user_name(plan: PlanData, value: str, module_of: ModuleOf) -> str:
    """A name that ``explain`` accepts: an input's, that of the module that returns the value, ``node[k]`` for one of several results, or
    the node's."""
    node = value.removesuffix(AGAIN)
    if node in plan.kinds:
        return plan.called(node)
    module = module_of(node)
    if module is None and node in plan.picked:
        return "{}[{}]".format(*plan.picked[node])
    return module or node
