"""A plan as text: cost, memory, repeated work, then every node and every collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fxshard.byte_sizes import size_text
from fxshard.errors import count_text
from fxshard.layout.layouts import Layout, placement_str
from fxshard.plans.offload import OPTIMIZER, PARAMETERS
from fxshard.plans.plan_data import AGAIN, PlanData, PlannedCollective, PlannedNode, by_cause
from fxshard.plans.plan_sizes import mean_text, sizes_text
from fxshard.text_table import fitted, labelled, listed, number_runs

NAMES_WIDTH = 160
"""Maximum characters of a list of names."""

MAX_LAYOUTS = 4
"""Up to this many layouts of a node are written one by one; in longer lists, runs of equal ones are counted."""


def plan_text(plan: PlanData) -> str:
    """The text of ``print(plan)``; ``fxshard.inspect.nodes_table`` and ``collectives_table`` show everything in full."""
    purpose = "forward and backward" if plan.train else "forward"
    first = f"plan for {plan.mesh} ({plan.mesh.hardware.name}), {purpose}, {count_text(len(plan.nodes), 'node')}"
    parts = [f"{first}\n{labelled(summary_rows(plan))}"]
    parts.append(fitted([_node(plan, n) for n in plan.nodes], ("node", "operator", "reads", "gives")))
    parts.append(_collectives(plan))
    parts += [fitted(found, (heading, "reason"), same=False) for heading, found in by_cause(plan.fallbacks).items()]
    return "\n\n".join(parts)


def summary_rows(plan: PlanData) -> list[tuple[str, str]]:
    """(label, text): cost and proof, priced sizes, memory and its limit, hidden communication, repeated gathers, packed parameters,
    recomputed blocks, gathers in fp8, and what is on the host."""
    rows = [("objective", proof_text(plan))]
    rows += [("priced", mean_text(plan))] if plan.example_sizes else []
    if plan.memory or plan.memory_limit is not None:
        rows.append(("memory", memory_text(plan)))
    rows += [("beside compute", hidden_text(plan))] if plan.hidden else []
    for label, names in redistributed_twice(plan).items():
        rows.append((label, f"{listed(merged_names(names), NAMES_WIDTH)}, again in the backward"))
    rows += [("packed", text) for text in packed_texts(plan)]
    rows += [("computed again", recomputed_text(plan))] if plan.recomputed else []
    rows += [("gathered in fp8", text) for text in fp8_texts(plan)]
    return rows + [(f"{kind} on the host", text) for kind, text in offloaded_texts(plan).items()]


def earlier_redistribution(plan: PlanData) -> dict[int, int]:
    """Index of a redistribution -> index of an earlier one of the same value to the same layout; a second run gives the same value."""
    first: dict[tuple[str, Layout], int] = {}
    keys = [(entry.value.removesuffix(AGAIN), entry.target) for entry in plan.redistributions]
    return {k: first[key] for k, key in enumerate(keys) if first.setdefault(key, k) != k}


def redistributed_twice(plan: PlanData) -> dict[str, list[str]]:
    """Values that are redistributed, dropped, and redistributed again for the backward, under ``gathered twice`` or ``moved twice``."""
    found: dict[str, list[str]] = {}
    for index in earlier_redistribution(plan):
        entry = plan.redistributions[index]
        label = "gathered twice" if any(step.kind == "all_gather" for step in entry.steps) else "moved twice"
        if not entry.value.endswith(AGAIN):  # the recomputed blocks already say so
            found.setdefault(label, []).append(plan.called(entry.value))
    return {label: list(dict.fromkeys(names)) for label, names in found.items()}


def packed_texts(plan: PlanData) -> list[str]:
    """For each way to pack parameters, what it means and which have it."""
    found: dict[str, list[str]] = {}
    for end in plan.inputs:
        spec = plan.specs.get(end.node) if end.kind == "parameter" else None
        for p in spec.outputs[0].packed if spec is not None else ():
            found.setdefault(f"{placement_str(p)} shards each part of dim {p.dim} by itself", []).append(end.name)
    return [f"{meaning}: {listed(merged_names(names), NAMES_WIDTH)}" for meaning, names in found.items()]


def proof_text(plan: PlanData) -> str:
    """Objective, lower bound and gap, and whether the search was cut short."""
    if plan.partial:
        return "none: a partial plan is a set of pins"
    c = plan.certificate
    if not c.gap and not c.cut:
        among = "" if plan.memory_limit is None else ", of all plans within the limit"
        return f"{cost_text(c.objective, c.unit)}, proven optimal (gap 0){among}"
    cut = ", cut short by its time or work limit" if c.cut else ""
    return f"{cost_text(c.objective, c.unit)}, lower bound {cost_text(c.lower_bound, c.unit)}, gap {c.gap:.3%}{cut}"


def memory_text(plan: PlanData) -> str:
    """The peak, the limit, and the bytes of each kind, the largest first."""
    limit = "" if plan.memory_limit is None else f" of {size_text(plan.memory_limit)}"
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sorted(plan.memory.items(), key=lambda one: -one[1]) if size)
    at = f"{limit} a device at its peak{sizes_text(plan.memory_sizes)}"
    return f"{size_text(sum(plan.memory.values()))}{at}{f': {kinds}' if kinds else ''}"


def hidden_text(plan: PlanData) -> str:
    """The hidden communication, in words."""
    times = " and ".join(f"{time_text(time)} of {kind}" for kind, time in plan.hidden.items())
    return f"assumes {times} hidden behind compute"


def recomputed_text(plan: PlanData) -> str:
    """The recomputed blocks, in one line."""
    count = len(plan.recomputed)
    return f"{count_text(count, 'block')}: {listed(merged_names(plan.recomputed), NAMES_WIDTH)}"


def fp8_texts(plan: PlanData) -> list[str]:
    """The gathers of values in fp8, in one line, if there are any."""
    fp8 = {node.name for node in plan.nodes if any(dtype.startswith("float8") for dtype in node.dtypes)}
    sent = [c.bytes for c in plan.collectives if c.kind == "all_gather" and c.value in fp8]
    return [f"{count_text(len(sent), 'gather')}, {size_text(sum(sent))}: planned only, not run on a GPU yet"] if sent else []


def offloaded_texts(plan: PlanData) -> dict[str, str]:
    """What is on the host, by kind: of which parameters, how many bytes, what a step copies, and what that costs."""
    found: dict[str, str] = {}
    for kind, word in ((OPTIMIZER, "optimizer state"), (PARAMETERS, "parameters")):
        ones = [one for one in plan.offloaded if one.kind == kind]
        held, inward, outward = (size_text(sum(getattr(one, name) for one in ones)) for name in ("held", "inward", "outward"))
        cost = cost_text(sum(one.cost for one in ones), plan.certificate.unit)
        names = listed(merged_names(plan.called(one.node) for one in ones), NAMES_WIDTH)
        if ones:
            found[word] = f"{held}: a step copies {inward} to the device and {outward} back, {cost}; of {names}"
    return found


def cost_text(value: float, unit: str) -> str:
    """A cost as text: a time, or bytes that a rank sends."""
    return size_text(value) if unit == "bytes" else time_text(value)


def time_text(microseconds: float) -> str:
    """Four digits and a unit: ``10.75 us``, ``43.07 ms``."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= 0.99995 * factor:
            return f"{microseconds / factor:,.4g} {unit}"
    return f"{microseconds:.4g} us" if abs(microseconds) >= 1e-6 else "0 us"


def merged_names(names: Iterable[str]) -> list[str]:
    """``layers.0-2.wq`` for ``layers.0.wq``, ``layers.1.wq``, ``layers.2.wq``: merges names that differ in one number."""
    return [name for name, _ in merged_names_with_counts(names)]


def merged_names_with_counts(names: Iterable[str]) -> list[tuple[str, int]]:
    """As ``merged_names``, with the number of names that each merged name replaces."""
    found: dict[tuple[str, str], list[int]] = {}
    for name in names:
        head, number, tail = _split(name)
        found.setdefault((head, tail), []).append(number)
    texts = (head if numbers[0] < 0 else f"{head}{','.join(number_runs(numbers))}{tail}" for (head, tail), numbers in found.items())
    return list(zip(texts, map(len, found.values()), strict=True))


def _split(name: str) -> tuple[str, int, str]:
    """(text before the first part of a dotted name that is a number, the number, text after it); without one (name, -1, "")."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return name, -1, ""
    return ".".join([*parts[:at], ""]), int(parts[at]), ".".join(["", *parts[at + 1 :]]) if parts[at + 1 :] else ""


def _node(plan: PlanData, node: PlannedNode) -> tuple[str, str, str, str]:
    name = plan.called(node.name)
    op = plan.kinds.get(node.name, node.op) if node.op == "placeholder" else node.op
    return name, op, _layouts(node.spec.inputs), _layouts(node.spec.outputs)


def _layouts(layouts: Sequence[Layout]) -> str:
    if len(layouts) <= MAX_LAYOUTS:
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
    """The readers of a collective's value; for a returned value, the output's name."""
    names = sorted({n for n, _ in collective.readers if n != "output"})
    ends = [plan.outputs[k] for n, k in collective.readers if n == "output" and k < len(plan.outputs)]
    names += [end.name if end.kind == "output" else f"{end.kind} {end.name}" for end in ends]
    return ", ".join(names) or ("output" if collective.readers else "the backward")
