"""Everything that a plan says, as tables: nodes, parameters, collectives, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tabulate import tabulate

from fxshard.byte_sizes import exact_size, size_text
from fxshard.errors import OptionError, closest
from fxshard.text_table import MAX_CELL, fitted, labelled, shorten
from fxshard.views.plan_view import Collective, Fields, PlanView, Where
from fxshard.views.reasons import reason, where
from fxshard.views.screen import limit_rows, whole_bytes
from fxshard.views.words import cost_text, layout_words, shape_text

WIDE = 160
"""Characters in a line of the tables that say reasons."""


def nodes_table(view: PlanView, globs: Sequence[str] = ()) -> str:
    """One line per node: operator, or kind and name of an input; layouts of operands and outputs, global shapes, cost."""
    chosen = matching(globs, view.nodes.items(), lambda one: names_of(view, one[0]), "node")
    rows = [_node(view, node) for _, node in chosen]
    return _table(rows, ("node", "operator", "reads", "gives", "shape", "us" if view.unit == "microseconds" else "bytes"))


def _node(view: PlanView, node: Fields) -> tuple[Any, ...]:
    name = node["name"]
    op = " ".join(view.inputs[name]) if name in view.inputs else node.get("op", "")
    shapes = ", ".join(map(shape_text, node.get("shapes", ())))
    return name, op, _runs(node.get("inputs", ())), _runs(node["outputs"]), shapes, node.get("compute", 0.0)


def _runs(layouts: Sequence[str], most: int = 4) -> str:
    """Layouts one by one; in longer lists, runs of equal ones are counted."""
    if len(layouts) <= most:
        return ", ".join(layouts)
    runs: list[list[Any]] = []
    for layout in layouts:
        if runs and runs[-1][1] == layout:
            runs[-1][0] += 1
        else:
            runs.append([1, layout])
    return ", ".join(f"{count} x {layout}" if count > 1 else layout for count, layout in runs)


def parameters_table(view: PlanView, globs: Sequence[str] = ()) -> str:
    """One line per parameter and buffer: layout, shape, dtype, bytes of the whole tensor and of the largest shard."""
    held = [(node, kind, name) for node, (kind, name) in view.inputs.items() if kind in ("parameter", "buffer") and node in view.nodes]
    chosen = matching(globs, held, lambda one: (one[2], one[0]), "parameter")
    rows = [_parameter(view, node, kind, name) for node, kind, name in chosen]
    return _table(rows, ("parameter", "kind", "layout", "shape", "dtype", "whole", "per device")) if rows else "no parameters"


def _parameter(view: PlanView, node: str, kind: str, name: str) -> tuple[Any, ...]:
    said, layout = view.nodes[node], view.nodes[node]["outputs"][0]
    shapes, size = said.get("shapes", ()), whole_bytes(said)
    shape, dtype = (shape_text(shapes[0]), said["dtypes"][0]) if shapes else ("", "")
    share = size / view.local_share(layout, shapes[0]) if shapes else 0
    return name, kind, layout_words(layout, list(view.axes)), shape, dtype, size_text(size), size_text(share)


def collectives_table(view: PlanView, globs: Sequence[str] = (), width: int = WIDE) -> str:
    """One line per collective, numbered as for ``plan.why_collective``: bytes that each rank sends, cost, layouts, module and reason."""
    if not view.collectives:
        return "no collectives"
    chosen = matching(globs, view.collectives, lambda c: (where(view, c).module, *names_of(view, c.value)), "collective")
    rows = [_collective(view, c) for c in chosen]
    return fitted(rows, ("no.", "collective", "axis", "bytes", "time", "layouts", "where", "reason"), width=width)


def _collective(view: PlanView, c: Collective) -> tuple[Any, ...]:
    cost = "in compute" if c.own else cost_text(c.cost, view.unit) if not c.hidden else f"{cost_text(c.cost, view.unit)}, rest hidden"
    return c.number, c.kind, c.axis, size_text(c.bytes), cost, f"{c.source} -> {c.target}", where_text(view, c), reason(view, c)


def where_text(view: PlanView, c: Collective) -> str:
    """The module, and whether its backward is meant."""
    place: Where = where(view, c)
    return f"{place.module}{', backward' if place.backward and view.train else ''}"


def memory_kinds(view: PlanView) -> str:
    """The peak by kind of use, with the limit."""
    whole = sum(view.memory.values())
    kinds = sorted(view.memory.items(), key=lambda one: -one[1])
    rows = [(kind, size_text(size), f"{size / max(whole, 1):.1%}") for kind, size in kinds if size]
    head = [("peak per device", exact_size(whole)), *limit_rows(view)]
    return f"{labelled(head)}\n\n{fitted(rows, ('at the peak', 'bytes', 'share'), same=False)}"


def names_of(view: PlanView, node: str) -> Iterator[str]:
    """All names by which a node can be asked for: its own, the user's, its module's."""
    yield node
    if node in view.inputs:
        yield view.inputs[node][1]
    place = view.place(view.producer(node))
    if place is not None:
        yield place.module


def matching(globs: Sequence[str], values: Iterable[Any], names: Callable[[Any], Iterable[str]], noun: str) -> list[Any]:
    """The values of which a name matches one of the globs; all without globs. Raises OptionError for a glob that matches nothing."""
    every = list(values)
    if not globs:
        return every
    named = [(value, tuple(names(value))) for value in every]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for _, found in named for name in found):
            hint = closest(glob, {name for _, found in named for name in found})
            remedy = "give a name or a glob of nodes, parameters or modules, for example 'layers.0.*'"
            raise OptionError(f"no {noun} matches {glob!r}{hint}", remedy=remedy)
    return [value for value, found in named if any(fnmatchcase(name, glob) for glob in globs for name in found)]


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Only the numeric columns are parsed as numbers, so that a name like 1e3 is printed as it is."""
    kept = [i for i, header in enumerate(headers) if header not in ("count", "us")]
    right = ("bytes", "whole", "per device")
    align = ["right" if header in right else "left" if i in kept else "decimal" for i, header in enumerate(headers)]
    cells = [[shorten(one, MAX_CELL) if isinstance(one, str) else one for one in row] for row in rows]
    return tabulate(cells, headers=headers, disable_numparse=kept, colalign=align if rows else None)
