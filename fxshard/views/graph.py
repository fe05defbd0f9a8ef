"""The graph of modules, alike layers together, as DOT and as SVG."""

from __future__ import annotations

import html
import math
from collections import Counter
from dataclasses import dataclass

from fxshard.byte_sizes import size_text
from fxshard.text_table import listed
from fxshard.views.plan_view import PlanView
from fxshard.views.reasons import module_of
from fxshard.views.words import alike, cost_text, layout_words, pattern

Edge = tuple[str, str]
WIDTH, HEIGHT, ACROSS, DOWN = 250, 56, 40, 46
"""Pixels of a box in SVG, and of the gaps beside and below it."""


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
    layouts = _parameter_layouts(view)
    lines: dict[str, tuple[str, ...]] = {
        box: (listed(alike(found), 40), layouts.get(box, ""), cost_text(math.fsum(times[box]), view.unit)) for box, found in names.items()
    }
    return ModuleGraph(lines, _edges(view, boxes))


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
    sent: dict[tuple[str, str], Counter[str]] = {}
    for c in view.collectives:
        for reader, _ in c.readers:
            sent.setdefault((view.producer(c.value), reader), Counter())[f"{c.kind} on {c.axis}, {size_text(c.bytes)}"] += 1
    edges: dict[Edge, Counter[str]] = {}
    for reader, made in view.reads.items():
        for node in made:
            if node in boxes and reader in boxes and boxes[node] != boxes[reader]:
                edges.setdefault((boxes[node], boxes[reader]), Counter()).update(sent.get((node, reader), Counter()))
    told = {edge: [f"{count} {text}" if count > 1 else text for text, count in found.items()] for edge, found in edges.items()}
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
    width, height = most * (WIDTH + ACROSS) + ACROSS, len(rows) * (HEIGHT + DOWN) + DOWN
    left = {box: (width - len(rows[row]) * (WIDTH + ACROSS) + ACROSS) / 2 + k * (WIDTH + ACROSS) for box, (k, row) in at.items()}
    top = {box: DOWN + row * (HEIGHT + DOWN) for box, (_, row) in at.items()}
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [f'{head} font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>']
    for (one, other), said in graph.edges.items():
        x1, y1, x2, y2 = left[one] + WIDTH / 2, top[one] + HEIGHT, left[other] + WIDTH / 2, top[other]
        dashed = ' stroke-dasharray="5 4"' if y2 <= y1 else ""
        color = "#d55e00" if said else "#999999"
        parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="{2 if said else 1}"{dashed}/>')
        parts += [_text((x1 + x2) / 2, (y1 + y2) / 2, said, color)] if said else []
    for box, lines in graph.lines.items():
        parts.append(f'<rect x="{left[box]:g}" y="{top[box]:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef4fb" stroke="#0072b2"/>')
        shown = [line for line in lines if line]
        parts += [_text(left[box] + WIDTH / 2, top[box] + 17 + 15 * k, line, "#111111") for k, line in enumerate(shown)]
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, color: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="{color}">{html.escape(text)}</text>'


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
