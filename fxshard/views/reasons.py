"""Where a collective belongs in the model, and why it is there, in a sentence."""

from __future__ import annotations

import re

from fxshard.text_table import in_short
from fxshard.views.plan_view import AGAIN, Collective, PlanView, Where

OWN = {
    "shift": "the ring: keys and values pass to the next rank",
    "zigzag": "the ring: the two halves of the sequence trade places",
    "dispatch": "rows go to the ranks of their experts",
    "combine": "rows come back from the ranks of their experts",
    "all_to_all": "ranks tell how many rows come",
}


def where(view: PlanView, c: Collective) -> Where:
    """The module of the parameter whose gradient or weight moves; else that of the node that makes the value, or of a reader."""
    end = returned(view, c)
    if end is not None and end[0] in ("gradient", "mutation"):
        return Where(module_of(end[1]), True)
    kind, name = view.inputs.get(c.value, ("", ""))
    readers = [place for node, _ in c.readers if (place := view.place(node)) is not None]
    if kind in ("parameter", "buffer"):
        return Where(module_of(name), bool(readers) and all(place.backward for place in readers))
    made = view.place(view.producer(c.value))
    if made is not None:
        return made if made.backward or not readers else Where(made.module, all(place.backward for place in readers))
    if readers:
        return readers[0]
    if end is not None:
        return Where(end[1], False)
    line = in_short(view.line(view.producer(c.value)) or next((view.line(node) for node, _ in c.readers if view.line(node)), ""))
    return Where(":".join(line.split(":")[:2]) or view.called(c.value), False)


def module_of(parameter: str) -> str:
    """The module that holds a parameter: its name without the last part; of a parameter of the model itself, its own name."""
    return parameter.rpartition(".")[0] or parameter


def _placed(placement: str) -> str:
    """A placement in words: without the axes over which a dim is folded."""
    return re.sub(r" in [\d,]+", "", placement)


def reason(view: PlanView, c: Collective) -> str:
    """Why the collective runs: which layouts disagree."""
    if c.own:
        return OWN.get(c.kind, "part of the operator")
    end = returned(view, c)
    kind = view.inputs.get(c.value, ("", ""))[0]
    if c.before.startswith("P"):
        return _sum(c, end)
    if c.kind == "all_gather" and kind in ("parameter", "buffer"):
        again = ", again in the backward" if c.entry in view.earlier or c.value.endswith(AGAIN) else ""
        return f"the weight is kept as {_placed(c.before)}, and used whole on {c.axis}{again}"
    reader = _reader(view, c)
    if c.kind == "all_gather":
        return f"made as {_placed(c.before)}, {reader} whole on {c.axis}"
    return f"made as {_placed(c.before)}, {reader} as {_placed(c.after)}"


def _sum(c: Collective, end: tuple[str, str] | None) -> str:
    rest = "" if c.kind == "all_reduce" else f"; each keeps its {_placed(c.after)}"
    if end is not None and end[0] == "gradient":
        return f"gradient: each rank summed over its part of the data{rest}"
    if c.before != "P":
        return f"each rank has the {c.before[2:-1]} of its part{rest}"
    return f"partial sum: the dim summed over is sharded{rest}"


def _reader(view: PlanView, c: Collective) -> str:
    end = returned(view, c)
    if end is not None:
        return f"returned as {end[1]}"
    operators = {operator(view.nodes[node]["op"]) for node, _ in c.readers if node in view.nodes}
    return f"{min(operators)} reads it" if len(operators) == 1 else f"{len(operators)} operators read it" if operators else "kept"


def returned(view: PlanView, c: Collective) -> tuple[str, str] | None:
    """(kind, name) of the output that the value is returned as, if it is."""
    ends = [view.outputs[k] for node, k in c.readers if node == "output" and k < len(view.outputs)]
    return ends[0] if ends else None


def operator(name: str) -> str:
    """An operator's name without library and overload: ``aten.mm.default`` -> ``mm``."""
    return re.sub(r"^\w+\.(\w+)\.\w+$", r"\1", name)
