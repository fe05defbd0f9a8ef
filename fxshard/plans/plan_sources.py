"""The part of a plan's file that decides nothing: where nodes come from, and what the plan's collectives send and cost.

Views of a file need it because they load neither torch nor the graph. A plan's ``hash`` leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fxshard.files import Field, Readers
from fxshard.plans.plan_data import Place, PlanData, PlannedCollective

FIX = "correct this field, or make the plan again"
ROUNDING = 1e-9
"""Two costs count as equal up to this relative difference."""


def write_sources(plan: PlanData) -> dict[str, Any]:
    """Source lines and modules with their nodes, the nodes that each node reads, picked results, and the collectives."""
    lines: dict[str, list[str]] = {}
    for node, line in plan.lines.items():
        lines.setdefault(line, []).append(node)
    modules: dict[Place, list[str]] = {}
    for node, place in plan.places.items():
        modules.setdefault(place, []).append(node)
    return {
        "picked": [{"value": value, "node": node, "output": int(index)} for value, (node, index) in plan.picked.items()],
        "lines": [{"line": line, "nodes": found} for line, found in lines.items()],
        **({"model": plan.model} if plan.model else {}),
        **({"modules": [_write_place(place, nodes) for place, nodes in modules.items()]} if modules else {}),
        **({"reads": [{"node": node, "of": list(made)} for node, made in plan.reads.items()]} if plan.reads else {}),
        **({"results": [{"node": node, "of": list(picked)} for node, picked in plan.results.items()]} if plan.results else {}),
        **({"collectives": [write_collective(c) for c in plan.collectives]} if plan.collectives else {}),
    }


def _write_place(place: Place, nodes: list[str]) -> dict[str, Any]:
    return {"module": place.module, **({"backward": True} if place.backward else {}), "nodes": nodes}


def write_collective(c: PlannedCollective) -> dict[str, Any]:
    """A collective as JSON fields. ``entry`` and ``step``: as in ``PlannedCollective``."""
    figures = {"bytes": int(c.bytes), "cost": float(c.cost), **({"hidden": float(c.hidden)} if c.hidden else {})}
    return {"kind": c.kind, "axis": c.axis, **figures, "from": str(c.source), "to": str(c.target), "entry": c.entry, "step": c.step}


def _read_picked(field: Field) -> dict[str, tuple[str, int]]:
    picked = {}
    for one in field.items():
        value, node, output = one.record({"value": Field.text, "node": Field.text, "output": Field.whole}).values()
        picked[value] = (node, output)
    return picked


def _texts(field: Field) -> tuple[str, ...]:
    return field.tuple_of(Field.text)


def _read_lines(field: Field) -> dict[str, str]:
    lines: dict[str, str] = {}
    for one in field.items():
        line, nodes = one.record({"line": Field.text, "nodes": _texts}).values()
        lines |= dict.fromkeys(nodes, line)
    return lines


def _read_places(field: Field) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for one in field.items():
        said = one.record({"module": Field.text, "nodes": _texts}, {"backward": Field.boolean})
        places |= dict.fromkeys(said["nodes"], Place(said["module"], said.get("backward", False)))
    return places


def _read_reads(field: Field) -> dict[str, tuple[str, ...]]:
    rows = (one.record({"node": Field.text, "of": _texts}).values() for one in field.items())
    return {node: made for node, made in rows}


def _read_results(field: Field) -> dict[str, tuple[int, ...]]:
    rows = (one.record({"node": Field.text, "of": lambda f: f.tuple_of(Field.whole)}).values() for one in field.items())
    return {node: picked for node, picked in rows}


SOURCES: Mapping[str, tuple[str, Any]] = {
    "picked": ("picked", _read_picked),
    "lines": ("lines", _read_lines),
    "model": ("model", Field.text),
    "modules": ("places", _read_places),
    "reads": ("reads", _read_reads),
    "results": ("results", _read_results),
}
"""Field of the file -> field of the plan, and its reader."""


def check_collectives(plan: PlanData, field: Field) -> None:
    """Raises FileError unless the collectives in the file are those of the plan."""
    texts = dict.fromkeys(("kind", "axis", "from", "to"), Field.text)
    numbers: Readers = {"bytes": Field.whole, "cost": Field.figure, "entry": Field.whole, "step": Field.whole}
    rows = field.items()
    if len(rows) != len(plan.collectives):
        raise field.fail(f"{len(rows)} collectives are listed, but the plan has {len(plan.collectives)}", FIX)
    for row, c in zip(rows, plan.collectives, strict=True):
        said, known = row.record({**texts, **numbers}, {"hidden": Field.figure}), write_collective(c)
        for name in said | known:
            one, other = said.get(name, 0.0), known.get(name, 0.0)
            if one != other and not (name in ("cost", "hidden") and math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING)):
                raise row.fail(f"{name} is {one}, but the plan's redistributions and nodes give {other}", FIX)
