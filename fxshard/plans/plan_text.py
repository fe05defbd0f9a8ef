"""A PlanData as people read it: what it costs, what it holds, what is done twice, then every node and every collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fxshard.errors import count_text
from fxshard.layout.layouts import Layout
from fxshard.plans.plan_data import AGAIN, PlanData, PlannedCollective, PlannedNode, by_cause
from fxshard.plans.plan_sizes import mean_text, sizes_text
from fxshard.sizes import size_text
from fxshard.text_table import fitted, labelled, listed

TOLD = 160
"""Characters of names that a line lists, which then goes on in the next."""

APART = 4
"""Layouts of a node that are written one by one; of more, those alike in a row are counted."""


def plan_text(plan: PlanData) -> str:
    """What ``print(plan)`` shows; ``fxshard.inspect.nodes_table`` and ``collectives_table`` have it all in full."""
    purpose = "forward and backward" if plan.train else "forward"
    first = f"plan for {plan.mesh} ({plan.mesh.hardware.name}), {purpose}, {count_text(len(plan.nodes), 'node')}"
    parts = [f"{first}\n{labelled(told(plan))}"]
    parts.append(fitted([_node(plan, n) for n in plan.nodes], ("node", "operator", "reads", "gives")))
    parts.append(_collectives(plan))
    parts += [fitted(found, (heading, "reason"), same=False) for heading, found in by_cause(plan.fallbacks).items()]
    return "\n\n".join(parts)


def told(plan: PlanData) -> list[tuple[str, str]]:
    """(label, text): cost and proof, at which sizes, memory against its limit, what is hidden, done twice, computed again."""
    rows = [("objective", proof(plan))]
    rows += [("priced", mean_text(plan))] if plan.example_sizes else []
    if plan.memory or plan.memory_limit is not None:
        rows.append(("memory", memory(plan)))
    rows += [("beside compute", assumption(plan))] if plan.hidden else []
    for label, names in twice(plan).items():
        rows.append((label, f"{listed(numbered(names), TOLD)}, again in the backward"))
    return rows + ([("computed again", repeated(plan))] if plan.recomputed else [])


def done_before(plan: PlanData) -> dict[int, int]:
    """Redistribution -> an earlier one that brings the same value into the same layout; both by their index. A value that is computed
    again is the same."""
    first: dict[tuple[str, Layout], int] = {}
    keys = [(entry.value.removesuffix(AGAIN), entry.target) for entry in plan.redistributions]
    return {k: first[key] for k, key in enumerate(keys) if first.setdefault(key, k) != k}


def twice(plan: PlanData) -> dict[str, list[str]]:
    """What is brought into a layout, dropped, and brought there again for the backward, by how it is brought there."""
    found: dict[str, list[str]] = {}
    for index in done_before(plan):
        entry = plan.redistributions[index]
        label = "gathered twice" if any(step.kind == "all_gather" for step in entry.steps) else "moved twice"
        if not entry.value.endswith(AGAIN):  # said by the blocks that are computed again
            found.setdefault(label, []).append(plan.called(entry.value))
    return {label: list(dict.fromkeys(names)) for label, names in found.items()}


def proof(plan: PlanData) -> str:
    """Objective, lower bound, gap; whether it was cut."""
    if plan.partial:
        return "none: a partial plan is a set of pins"
    c = plan.certificate
    if not c.gap and not c.cut:
        counted = "" if plan.memory_limit is None else ", of all plans within the limit"
        return f"{amount(c.objective, c.unit)}, proven optimal (gap 0){counted}"
    cut = ", cut short by its time or work limit" if c.cut else ""
    return f"{amount(c.objective, c.unit)}, lower bound {amount(c.lower_bound, c.unit)}, gap {c.gap:.3%}{cut}"


def memory(plan: PlanData) -> str:
    """The peak against the limit, then by kind, the largest first."""
    limit = "" if plan.memory_limit is None else f" of {size_text(plan.memory_limit)}"
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sorted(plan.memory.items(), key=lambda one: -one[1]) if size)
    at = f"{limit} a device at its peak{sizes_text(plan.memory_sizes)}"
    return f"{size_text(sum(plan.memory.values()))}{at}{f': {kinds}' if kinds else ''}"


def assumption(plan: PlanData) -> str:
    """What is assumed to be hidden, in words."""
    times = " and ".join(f"{time_text(time)} of {kind}" for kind, time in plan.hidden.items())
    return f"assumes {times} hidden behind compute"


def repeated(plan: PlanData) -> str:
    """The blocks that run again in the backward, in a line."""
    count = len(plan.recomputed)
    return f"{count_text(count, 'block')}: {listed(numbered(plan.recomputed), TOLD)}"


def amount(value: float, unit: str) -> str:
    """What costs are in: a time, or bytes that a rank sends."""
    return size_text(value) if unit == "bytes" else time_text(value)


def time_text(microseconds: float) -> str:
    """Four digits and a unit: ``10.75 us``, ``43.07 ms``."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= 0.99995 * factor:
            return f"{microseconds / factor:,.4g} {unit}"
    return f"{microseconds:.4g} us" if abs(microseconds) >= 1e-6 else "0 us"


def numbered(names: Iterable[str]) -> list[str]:
    """``layers.0-2.wq`` for ``layers.0.wq``, ``layers.1.wq``, ``layers.2.wq``: names alike but for one number; others as they are."""
    return [name for name, _ in counted(names)]


def counted(names: Iterable[str]) -> list[tuple[str, int]]:
    """The same, and how many each stands for."""
    found: dict[tuple[str, str], list[int]] = {}
    for name in names:
        head, number, tail = _split(name)
        found.setdefault((head, tail), []).append(number)
    texts = (head if numbers[0] < 0 else f"{head}{_runs(numbers)}{tail}" for (head, tail), numbers in found.items())
    return list(zip(texts, map(len, found.values()), strict=True))


def _split(name: str) -> tuple[str, int, str]:
    """What stands before the first number of a dotted name, it, what follows; -1 where there is none."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return name, -1, ""
    return ".".join([*parts[:at], ""]), int(parts[at]), ".".join(["", *parts[at + 1 :]]) if parts[at + 1 :] else ""


def _runs(numbers: Iterable[int]) -> str:
    """``0-30,32``."""
    order = enumerate(sorted(set(numbers)))
    runs = [[number for _, number in run] for _, run in itertools.groupby(order, lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _node(plan: PlanData, node: PlannedNode) -> tuple[str, str, str, str]:
    name = plan.called(node.name)
    op = plan.kinds.get(node.name, node.op) if node.op == "placeholder" else node.op
    return name, op, _layouts(node.spec.inputs), _layouts(node.spec.outputs)


def _layouts(layouts: Sequence[Layout]) -> str:
    if len(layouts) <= APART:
        return ", ".join(map(str, layouts))
    runs = [(text, len(list(run))) for text, run in itertools.groupby(map(str, layouts))]
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in runs)


def _collectives(plan: PlanData) -> str:
    if not plan.collectives:
        return "no collectives"
    rows = [
        (k, c.kind, c.axis, size_text(c.bytes), f"{c.source} -> {c.target}", plan.called(c.value), readers(plan, c))
        for k, c in enumerate(plan.collectives)
    ]
    return fitted(rows, ("no.", "collective", "axis", "bytes", "layouts", "of", "for"))


def readers(plan: PlanData, collective: PlannedCollective) -> str:
    """Who reads it; of what is returned, as what."""
    names = sorted({n for n, _ in collective.readers if n != "output"})
    ends = [plan.outputs[k] for n, k in collective.readers if n == "output" and k < len(plan.outputs)]
    names += [end.name if end.kind == "output" else f"{end.kind} {end.name}" for end in ends]
    return ", ".join(names) or ("output" if collective.readers else "the backward")
