"""The screen: a plan or a program in one view. ``print(plan)``, ``fxshard plan``, ``fxshard inspect`` and the demo all say it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from fxshard.byte_sizes import beyond_device, size_text
from fxshard.errors import count_text, printable
from fxshard.text_table import fitted, labelled, listed, shorten
from fxshard.views.fallbacks import by_cause
from fxshard.views.plan_view import Collective, Fields, PlanView, Where
from fxshard.views.reasons import module_of, reason, returned, where
from fxshard.views.words import NAMES_WIDTH, alike, cost_text, layout_words, merged_names, pattern, placements, shape_text, time_text

COSTLIEST, LAYOUTS = 5, 16
"""Number of collectives, and at most so many rows of layouts, on the screen."""

MADE = 3
"""Number of layouts of operators' results on the screen."""

OPTIMIZER = "optimizer."
"""With what the names of an optimizer's state and options begin (``passes.trace.optimizer_step``)."""
INDENT, NAMES, CELL = 10, 60, 160
"""Spaces before a reason; characters of a list of modules, and of a cell that a file says."""


def screen(view: PlanView, program: Fields | None = None) -> str:
    """Model, mesh, objective and gap, time of a step, memory, layouts by module, the costliest collectives and why they are there;
    of a ``program`` also its graphs, inputs, outputs, dynamic sizes and guards."""
    parts = [labelled(head(view, program)), layouts(view, LAYOUTS), costliest(view)]
    parts += [] if program is None else program_parts(view, program)
    parts += [fitted(found, (heading, "reason"), same=False) for heading, found in by_cause(view.fallbacks).items()]
    return printable("\n\n".join(part for part in parts if part))


def head(view: PlanView, program: Fields | None = None) -> list[tuple[str, str]]:
    """(label, text) of everything that is one line."""
    rows = [("model", model_text(view)), ("mesh", f"{view.mesh_text}, {view.devices} devices ({view.hardware})")]
    rows += [("not used", told)] if (told := idle_text(view)) else []
    rows.append(("objective", proof_text(view)))
    rows += [("priced", mean_text(view))] if view.fields.get("example_sizes") else []
    rows += [("step", step_text(view))] if not view.partial and view.objective else []
    rows += [("beside compute", hidden_text(view))] if view.hidden else []
    rows += [("buckets", told)] if (told := buckets_text(view)) else []
    rows += [("operators", told)] if (told := operators_text(view)) else []
    if view.memory or view.memory_limit is not None:
        rows.append(("memory", memory_text(view)))
    rows += [("does not fit", told)] if (told := beyond_device(sum(view.memory.values()), view.device_memory, view.hardware)) else []
    for label, names in view.repeated.items():
        rows.append((label, f"{listed(merged_names(names), NAMES_WIDTH)}, again in the backward"))
    rows += [("packed", text) for text in packed_texts(view)]
    blocks = [row["block"] for row in view.fields.get("recomputed", ())]
    rows += [("computed again", f"{count_text(len(blocks), 'block')}: {listed(merged_names(blocks), NAMES_WIDTH)}")] if blocks else []
    rows += [("gathered in fp8", text) for text in fp8_texts(view)]
    rows += [(f"{kind} on the host", text) for kind, text in offloaded_texts(view).items()]
    if program is not None:
        rows.append(("local graphs", graphs_text(program)))
        rows += [("collectives", told)] if (told := merged_text(view, [c["serves"] for c in program["collectives"]])) else []
    return rows + ([("compiled code", compiled_text(program))] if program is not None and program.get("compiled") else [])


def model_text(view: PlanView) -> str:
    """Name, parameters and passes of the model."""
    steps = _steps(view)
    own = [node for node in _tensors(view) if not (steps and view.inputs[node][1].startswith(OPTIMIZER))]
    size = sum(math.prod(view.nodes[node]["shapes"][0]) for node in own)
    name = f"{view.fields['model']}, " if view.fields.get("model") else ""
    held = f"{_many(size)} parameters in {count_text(len(own), 'tensor')}, " if own else ""
    purpose = "a training step with its optimizer" if steps else "forward and backward" if view.train else "forward"
    return f"{name}{held}{purpose}, {count_text(len(view.nodes), 'node')}"


def _tensors(view: PlanView) -> list[str]:
    """The nodes of the parameters whose shape is known."""
    return [node for node, (kind, _) in view.inputs.items() if kind == "parameter" and view.nodes.get(node, {}).get("shapes")]


def _steps(view: PlanView) -> bool:
    """Whether the optimizer's step is part of the program."""
    return any(name.startswith(f"{OPTIMIZER}groups.") for _, name in view.inputs.values())


def _many(count: int) -> str:
    """``8.03 billion``, ``459,000``."""
    for word, size in (("billion", 10**9), ("million", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"


def idle_text(view: PlanView) -> str:
    """The axes along which every rank does the same work; "" if there are none."""
    axes = view.axes if view.nodes and not view.partial else {}
    layouts_seen = {layout for node in view.nodes.values() for layout in node["outputs"]}
    used = {axis for layout in layouts_seen for axis, placement in zip(axes, placements(layout), strict=False) if placement != "R"}
    idle = [axis for axis, size in axes.items() if size > 1 and axis not in used]
    return f"{' and '.join(idle)}: no tensor is sharded there, all its ranks do the same work" if idle else ""


def proof_text(view: PlanView) -> str:
    """Objective, lower bound and gap, and whether the search was cut short."""
    if view.partial:
        return "none: a partial plan is a set of pins"
    if not view.gap and not view.cut:
        among = "" if view.memory_limit is None else ", of all plans within the limit"
        return f"{cost_text(view.objective, view.unit)}, proven optimal (gap 0){among}"
    cut = ", cut short by its time or work limit" if view.cut else ""
    return f"{cost_text(view.objective, view.unit)}, lower bound {cost_text(view.lower_bound, view.unit)}, gap {view.gap:.3%}{cut}"


def mean_text(view: PlanView) -> str:
    """The sizes over which the objective is averaged: ``the mean of 0.7 at batch=8 and 0.3 at batch=64``."""
    some = [(", ".join(f"{name}={size}" for name, size in one["sizes"].items()), one["weight"]) for one in view.fields["example_sizes"]]
    if len(some) == 1:
        return f"at {some[0][0]}"
    texts = [f"{weight:.4g} at {sizes}" for sizes, weight in some]
    return f"the mean of {', '.join(texts[:-1])} and {texts[-1]}"


def step_text(view: PlanView) -> str:
    """The objective, split into compute and exposed communication by axis; or the bytes by axis, if it is bytes."""
    if view.unit == "bytes":
        sent = {axis: sum(c.bytes for c in view.collectives if c.axis == axis) for axis in view.axes}
        return f"each rank sends {', '.join(f'{size_text(size)} on {axis}' for axis, size in sent.items())}"
    exposed = math.fsum(view.exposed.values())
    by_axis = ", ".join(f"{time_text(time)} on {axis}" for axis, time in view.exposed.items() if time)
    told = f"exposed communication {time_text(exposed)} ({exposed / view.objective:.1%})" if exposed else "no exposed communication"
    own = f", with the collectives of operators on {' and '.join(view.own_axes)}" if view.own_axes else ""
    return f"compute {time_text(view.compute)}{own}; {told}{f': {by_axis}' if by_axis else ''}"


def hidden_text(view: PlanView) -> str:
    """The hidden communication, in words."""
    times = " and ".join(f"{time_text(time)} of {kind}" for kind, time in view.hidden.items())
    return f"assumes {times} hidden behind compute"


def buckets_text(view: PlanView) -> str:
    """Which collectives share their start in the prices, where none overlaps with compute (``passes.annotation.overlap``); "" without."""
    if view.unit == "bytes" or view.overlaps:
        return ""
    gathered = any(c.kind == "all_gather" and view.inputs.get(c.value, ("",))[0] == "parameter" for c in view.collectives)
    reduced = any((end := returned(view, c)) is not None and end[0] == "gradient" for c in view.collectives)
    moved = " and ".join(["gathers of parameters"] * gathered + ["reductions of gradients"] * reduced)
    return f"{moved} cost their part of a full bucket and its packing, without a start of their own" if moved else ""


def operators_text(view: PlanView) -> str:
    """How the work is divided, which parameters do not say: the layouts of what operators make, the most frequent first; "" without."""
    raw = Counter(node["outputs"][0] for name, node in view.nodes.items() if name not in view.inputs and node.get("outputs"))
    made = Counter[str]()
    for layout, count in raw.items():  # few among thousands of nodes
        made[layout_words(layout, list(view.axes))] += count
    told = [f"{count / made.total():.0%} {layout}" for layout, count in made.most_common(MADE)]
    rest = 1 - sum(count for _, count in made.most_common(MADE)) / max(made.total(), 1)
    others = f"; {rest:.0%} others" if rest >= 0.005 else ""
    return f"{count_text(made.total(), 'result')}: {'; '.join(told)}{others}" if made else ""


def memory_text(view: PlanView) -> str:
    """The peak, the limit, and the bytes of each kind, the largest first."""
    limit = "" if view.memory_limit is None else f" of {size_text(view.memory_limit)}"
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in sorted(view.memory.items(), key=lambda one: -one[1]) if size)
    sizes = ", ".join(f"{name}={size}" for name, size in view.fields.get("memory_sizes", {}).items())
    at = f"{limit} a device at its peak{f', at {sizes}' if sizes else ''}"
    return f"{size_text(sum(view.memory.values()))}{at}{f': {kinds}' if kinds else ''}"


def limit_rows(view: PlanView) -> list[tuple[str, str]]:
    """The memory limit, and the dynamic sizes for which the peak is meant, where there are any."""
    sizes = ", ".join(f"{name}={size}" for name, size in view.fields.get("memory_sizes", {}).items())
    rows = [("limit", size_text(view.memory_limit))] if view.memory_limit is not None else []
    return rows + ([("at", sizes)] if sizes else [])


def packed_texts(view: PlanView) -> list[str]:
    """For each way to pack parameters, what it means and which have it."""
    found: dict[str, list[str]] = {}
    for node, (kind, name) in view.inputs.items():
        outputs = view.nodes[node]["outputs"] if kind == "parameter" and node in view.nodes else []
        for one in dict.fromkeys(placements(outputs[0])) if outputs else ():
            dim = re.fullmatch(r"S\((\d+):[\d+]+\)", one)
            if dim is not None:
                found.setdefault(f"{one} shards each part of dim {dim[1]} by itself", []).append(name)
    return [f"{meaning}: {listed(merged_names(names), NAMES_WIDTH)}" for meaning, names in found.items()]


def fp8_texts(view: PlanView) -> list[str]:
    """The gathers of values in fp8, in one line, if there are any."""
    fp8 = {name for name, node in view.nodes.items() if any(dtype.startswith("float8") for dtype in node.get("dtypes", ()))}
    sent = [c.bytes for c in view.collectives if c.kind == "all_gather" and c.value in fp8]
    return [f"{count_text(len(sent), 'gather')}, {size_text(sum(sent))}: planned only, not run on a GPU yet"] if sent else []


def offloaded_texts(view: PlanView) -> dict[str, str]:
    """What is on the host, by kind: of which parameters, how many bytes, what a step copies, and what that costs."""
    found: dict[str, str] = {}
    for kind, word in (("optimizer", "optimizer state"), ("parameters", "parameters")):
        ones = [one for one in view.fields.get("offloaded", ()) if one["kind"] == kind]
        held, inward, outward = (size_text(sum(one[name] for one in ones)) for name in ("held", "inward", "outward"))
        cost = cost_text(sum(one["cost"] for one in ones), view.unit)
        names = listed(merged_names(view.called(one["node"]) for one in ones), NAMES_WIDTH)
        if ones:
            found[word] = f"{held}: a step copies {inward} to the device and {outward} back, {cost}; of {names}"
    return found


def layouts(view: PlanView, most: int | None = None) -> str:
    """One line per layout of a module's parameters, alike layers and siblings together, then inputs and outputs.

    ``most``: number of lines of parameters; the rest are counted.
    """
    rows = _parameters(view)
    rest = 0 if most is None or len(rows) <= most else len(rows) - most + 1
    told: list[tuple[str, object, str, str]] = [(*row[:3], size_text(row[3])) for row in (rows[:-rest] if rest else rows)]
    told += [(f"and {rest} lines more (--params)", sum(row[1] for row in rows[-rest:]), "", "")] if rest else []
    told += [(name, "", layout, "") for name, layout in _ends(view)]
    return fitted(told, ("parameters and state" if _steps(view) else "parameters", "count", "layout", "bytes"), same=False) if told else ""


def _parameters(view: PlanView) -> list[tuple[str, int, str, int]]:
    """(names, their number, the layout in words, bytes of all of them together, whole)."""
    held: dict[str, list[str]] = {}
    for node in (node for node, (kind, _) in view.inputs.items() if kind == "parameter" and view.nodes.get(node, {}).get("outputs")):
        held.setdefault(module_of(view.inputs[node][1]), []).append(node)
    groups: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for module, nodes in held.items():
        for node in nodes:
            name, layout = view.inputs[node][1], view.nodes[node]["outputs"][0]
            said = module if len(nodes) == 1 and name == f"{module}.weight" else name
            groups.setdefault((pattern(said.rpartition(".")[0]), layout), []).append((said, whole_bytes(view.nodes[node])))
    return [
        (listed(alike(name for name, _ in found), NAMES), len(found), layout_words(layout, list(view.axes)), sum(size for _, size in found))
        for (_, layout), found in groups.items()
    ]


_ITEMSIZE = re.compile(r"\d+")


def whole_bytes(node: Fields) -> int:
    """Bytes of a node's first output, whole; 0 if its shape is unknown."""
    if not node.get("shapes"):
        return 0
    bits = _ITEMSIZE.search(node["dtypes"][0])
    return int(math.prod(node["shapes"][0])) * (int(bits[0]) // 8 if bits is not None else 1)


def _ends(view: PlanView) -> list[tuple[str, str]]:
    """(name, layout) of the inputs of a call and of its outputs."""
    axes = list(view.axes)
    ins = [(name, view.nodes[node]["outputs"]) for node, (kind, name) in view.inputs.items() if kind == "input" and node in view.nodes]
    rows = [(f"input {name}", layout_words(outputs[0], axes)) for name, outputs in ins if outputs]
    read = view.nodes["output"]["inputs"] if "output" in view.nodes else []
    outs = zip(view.outputs, read, strict=False)
    return rows + [(f"output {name}", layout_words(layout, axes)) for (kind, name), layout in outs if kind == "output"]


def costliest(view: PlanView, most: int = COSTLIEST) -> str:
    """The collectives that cost most, those of alike layers together, with their module and the reason."""
    if not view.collectives:
        return "no collectives" if not view.partial else ""
    groups = grouped(view)
    rows = [_row(view, found) for found in groups[:most]]
    table = fitted(rows, ("together", "collective", "each", "where"), same=False).splitlines()
    reasons = [f"{' ' * INDENT}{reason(view, found[0])}" for found in groups[:most]]
    lines = table[:2] + [text for pair in zip(table[2:], reasons, strict=True) for text in pair]
    rest = [c for found in groups[most:] for c in found]
    lines += [f"and {len(rest)} more (--collectives): {_cost(view, rest)}"] if rest else []
    head = f"{count_text(len(view.collectives), 'collective')}, {size_text(sum(c.bytes for c in view.collectives))} sent by each rank"
    return "\n".join([f"{head}; the costliest:" if rest else head, *lines])


def _row(view: PlanView, found: Sequence[Collective]) -> tuple[str, str, str, str]:
    first, places = found[0], [where(view, c) for c in found]
    count = f"{len(found)} " if len(found) > 1 else ""
    backward = ", backward" if places[0].backward and view.train else ""
    named = listed(alike(place.module or "the model itself" for place in places), NAMES) + backward
    return _cost(view, found), f"{count}{first.kind} on {first.axis}", size_text(first.bytes), named


def _cost(view: PlanView, found: Iterable[Collective]) -> str:
    """The cost of collectives together; what is hidden is said beside it."""
    every = list(found)
    cost, hidden = math.fsum(c.cost for c in every), math.fsum(c.hidden for c in every)
    if all(c.own for c in every) and every:
        return "in compute"
    return cost_text(cost, view.unit) + (f" + {time_text(hidden)} hidden" if hidden else "")


def grouped(view: PlanView) -> list[list[Collective]]:
    """The collectives, those of alike layers with the same size and reason together; the costliest first, hidden ones by what they hide."""
    groups: dict[Any, list[Collective]] = {}
    for c in view.collectives:
        place = where(view, c)
        key = c.kind, c.axis, c.bytes, reason(view, c), place.backward, pattern(Where(*place).module.rpartition(".")[0])
        groups.setdefault(key, []).append(c)
    return sorted(groups.values(), key=lambda found: [-math.fsum(c.cost for c in found), -sum(c.bytes for c in found)])


def graphs_text(program: Fields) -> str:
    """The number of local graphs, and which ranks share one."""
    if program["size_classes"] > 1:
        return f"{program['size_classes']}, one per size class"
    return "1, for all ranks" if program.get("by_rank") else "1, shards are even"


def merged_text(view: PlanView, served: Iterable[Sequence[object]]) -> str:
    """How many collectives a program issues, if some of them serve several of the plan's, which travel together; else "".

    ``served``: of each that it issues, those of the plan.
    """
    counts = [len(one) for one in served]
    together = f"{len(counts)} issued for the plan's {len(view.collectives)}, some of which travel together"
    return together if any(count > 1 for count in counts) else ""


def compiled_text(program: Fields) -> str:
    """For which device a program holds compiled code, for how many size classes, and how it is run."""
    devices, count, classes = program["compiled"]["devices"], program["compiled"]["models"], program["size_classes"]
    served = "for all ranks" if count == classes == 1 else f"for {count} of {classes} size classes"
    return f"for {' and '.join(devices)}, {served}; fxshard run --compiler aot_inductor runs it"


def program_parts(view: PlanView, program: Fields) -> list[str]:
    """Tables of a program's inputs and outputs, dynamic sizes, and guards."""
    rows = _ends_of_program(view, program)
    sizes = [(s["name"], ", ".join(f"dim {d} of {path}" for path, d in s["places"]), s["served"], s["example"]) for s in program["sizes"]]
    guards = [(guard["condition"], guard["where"]) for guard in program["guards"]]
    tables = (
        (rows, ("kind", "name", "layout", "shape")),
        (sizes, ("size", "of", "served", "in the tables")),
        (guards, ("taken for granted", "by")),
    )
    texts = [([tuple(shorten(str(cell), CELL) for cell in row) for row in found], headers) for found, headers in tables]
    return [tabulate(found, headers=headers, disable_numparse=True) for found, headers in texts if found]


def _ends_of_program(view: PlanView, program: Fields) -> list[tuple[str, str, str, str]]:
    """(kind, name, layout, shape): a line for each input and output of a call. What belongs to the model (buffers, gradients, updates in
    place) may be hundreds: those of a kind with one layout share a line."""
    axes, rows, rest = list(view.axes), [], dict[tuple[str, str], list[str]]()
    for end in (*program["inputs"], *program["outputs"]):
        layout = layout_words(end["layout"], axes)
        if end["kind"] in ("input", "output"):
            rows.append((end["kind"], end["name"], layout, shape_text(end["shape"])))
        elif end["kind"] != "parameter":
            rest.setdefault((end["kind"], layout), []).append(end["name"])
    for (kind, layout), names in rest.items():
        count = f"{len(names)}: " if len(names) > 1 else ""
        rows.append((kind, count + shorten(", ".join(alike(names)), NAMES), layout, ""))
    return rows
