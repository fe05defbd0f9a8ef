"""The graph of modules, alike layers together, as DOT and as SVG."""

from __future__ import annotations

import html
import math
from collections import Counter
from dataclasses import dataclass

from fxshard.byte_sizes import size_text
from fxshard.errors import printable
from fxshard.text_table import listed
from fxshard.views.plan_view import PlanView
from fxshard.views.reasons import module_of, where
from fxshard.views.words import alike, cost_text, layout_words, pattern

Edge = tuple[str, str]
WIDTH, HEIGHT, ACROSS, DOWN, BULGE = 260, 71, 40, 46, 150
"""Pixels of a box in SVG, of the gaps beside and below it, and at most of the curves at the right of boxes."""


@dataclass(frozen=True)
class ModuleGraph:
    """The forward graph by module. ``lines``: text of each box, by the pattern of its modules' names; ``edges``: values that pass between
    modules -> what their collectives do, "" without any."""

    lines: dict[str, tuple[str, ...]]
    edges: dict[Edge, str]


def module_graph(view: PlanView) -> ModuleGraph:
    """The modules of the forward, with their parameters' layouts and compute time, and the values between them."""
    boxes = _boxes(view)
    names: dict[str, dict[str, None]] = {}
    times: dict[str, list[float]] = {}
    for node, box in boxes.items():
        names.setdefault(box, {})[_module(view, node)] = None
        times.setdefault(box, []).append(view.nodes[node].get("compute", 0.0))
    layouts, gathers = _parameter_layouts(view), _of_parameters(view)
    lines: dict[str, tuple[str, ...]] = {
        box: (listed(alike(found), 40), layouts.get(box, ""), cost_text(math.fsum(times[box]), view.unit), gathers.get(box, ""))
        for box, found in names.items()
    }
    return ModuleGraph(lines, _edges(view, boxes))


def _of_parameters(view: PlanView) -> dict[str, str]:
    """The collectives of the forward that move parameters, by the box of their module."""
    found: dict[str, Counter[str]] = {}
    for c in view.collectives:
        place = where(view, c)
        if view.inputs.get(c.value, ("", ""))[0] == "parameter" and not place.backward:
            found.setdefault(pattern(place.module), Counter())[f"{c.kind} on {c.axis}"] += 1
    return {box: listed(_counted(counts), 40) for box, counts in found.items()}


def _counted(texts: Counter[str]) -> list[str]:
    return [f"{count} {text}" if count > 1 else text for text, count in texts.items()]


def _boxes(view: PlanView) -> dict[str, str]:
    """The box of each node of the forward."""
    return {node: pattern(_module(view, node)) for node in view.nodes if (place := view.place(node)) is not None and not place.backward}


def _module(view: PlanView, node: str) -> str:
    return view.places[node].module or "the model itself"


def _parameter_layouts(view: PlanView) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for node, (kind, name) in view.inputs.items():
        if kind == "parameter" and node in view.nodes:
            found.setdefault(pattern(module_of(name)), {})[layout_words(view.nodes[node]["outputs"][0], list(view.axes))] = None
    return {box: listed(layouts, 40) for box, layouts in found.items()}


def _edges(view: PlanView, boxes: dict[str, str]) -> dict[Edge, str]:
    edges: dict[Edge, Counter[str]] = {}
    for reader, made in view.reads.items():
        for node in made:
            if node in boxes and reader in boxes and boxes[node] != boxes[reader]:
                edges.setdefault((boxes[node], boxes[reader]), Counter())
    for c in view.collectives:
        ends = [(boxes.get(view.producer(c.value), ""), boxes.get(reader, "")) for reader, _ in c.readers]
        first = next((edge for edge in ends if edge in edges), None)
        if first is not None:  # once, on the way to the first of its readers
            edges[first][f"{c.kind} on {c.axis}, {size_text(c.bytes)} each"] += 1
    told = {edge: _counted(found) for edge, found in edges.items()}
    return {edge: listed(texts, 60) if texts else "" for edge, texts in told.items()}


def dot(graph: ModuleGraph) -> str:
    """Text for Graphviz; edges with collectives are red and say which."""
    rows = [f"  {_quoted(box)} [label={_quoted(chr(10).join(filter(None, lines)))}];" for box, lines in graph.lines.items()]
    for (one, other), said in graph.edges.items():
        marks = f" [label={_quoted(said)}, color=red, fontcolor=red]" if said else ""
        rows.append(f"  {_quoted(one)} -> {_quoted(other)}{marks};")
    return "\n".join(["digraph plan {", "  node [shape=box, fontname=Helvetica];", "  edge [fontname=Helvetica];", *rows, "}"])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def svg(graph: ModuleGraph) -> str:
    """A drawing: boxes in rows by their distance from the start, values that go back, to the next layer, dashed."""
    rows = _rows(graph)
    at = {box: (k, row) for row, boxes in enumerate(rows) for k, box in enumerate(boxes)}
    most = max(map(len, rows), default=1)
    inner, height = most * (WIDTH + ACROSS) + ACROSS, len(rows) * (HEIGHT + DOWN) + DOWN
    width = inner + BULGE
    left = {box: (inner - len(rows[row]) * (WIDTH + ACROSS) + ACROSS) / 2 + k * (WIDTH + ACROSS) for box, (k, row) in at.items()}
    top = {box: DOWN + row * (HEIGHT + DOWN) for box, (_, row) in at.items()}
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [f'{head} font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>']
    labels = []
    for (one, other), said in graph.edges.items():
        gap = at[other][1] - at[one][1]
        color = "#d55e00" if said else "#999999"
        look = f'fill="none" stroke="{color}" stroke-width="{2 if said else 1}"' + (' stroke-dasharray="5 4"' if gap <= 0 else "")
        x1, y1, x2, y2 = left[one] + WIDTH / 2, float(top[one] + HEIGHT), left[other] + WIDTH / 2, float(top[other])
        path, x, y = f"M {x1:g} {y1:g} L {x2:g} {y2:g}", (x1 + x2) / 2, (y1 + y2) / 2
        if gap != 1:  # beside the boxes between them
            x1, y1, x2, y2 = left[one] + WIDTH, top[one] + HEIGHT / 2, left[other] + WIDTH, top[other] + HEIGHT / 2
            x = max(x1, x2) + min(40 + 20 * abs(gap), BULGE)
            path, y = f"M {x1:g} {y1:g} C {x:g} {y1:g} {x:g} {y2:g} {x2:g} {y2:g}", (y1 + y2) / 2
        parts.append(f'<path d="{path}" {look}/>')
        labels += [_text(x, y, said, color)] if said else []
    for box, lines in graph.lines.items():
        parts.append(f'<rect x="{left[box]:g}" y="{top[box]:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef4fb" stroke="#0072b2"/>')
        shown = [line for line in lines if line]
        parts += [_text(left[box] + WIDTH / 2, top[box] + 17 + 15 * k, line, "#111111") for k, line in enumerate(shown)]
    return "\n".join([*parts, *labels, "</svg>"])


def _text(x: float, y: float, text: str, color: str) -> str:
    halo = 'stroke="white" stroke-width="3" paint-order="stroke"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="{color}" {halo}>{html.escape(printable(text))}</text>'


def _rows(graph: ModuleGraph) -> list[list[str]]:
    """Boxes by the length of the longest way to them along edges that lead on in the order of the boxes."""
    order = {box: k for k, box in enumerate(graph.lines)}
    depth = dict.fromkeys(graph.lines, 0)
    for box in graph.lines:
        for one, other in graph.edges:
            if one == box and order[other] > order[one]:
                depth[other] = max(depth[other], depth[one] + 1)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for box, row in depth.items():
        rows[row].append(box)
    return [row for row in rows if row]
