"""The layouts of the published runs, as pins on weights by their role, on the residual stream and on products; the solver chooses the
rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from torch import fx

from bench.known_plans.layouts import COLUMNS, ROWS, KnownLayouts
from fxshard.graph.planning_graph import PlanningGraph, operands

SHARDED = KnownLayouts("S(0)", "S(0)", "S(0)", "S(0)", "S(0)", learned="P", sums="P")
BOTH = KnownLayouts("S(1)S(0)", "S(0)S(1)", "RR", "S(1)S(0)", "S(0)S(1)", "S(0)P", "PP", "S(0)P", "S(0)P", "PR", "PS(0)")
TENSOR = replace(BOTH, stream="S(0)R", learned="PR", looked_up=None)
"""autoparallel limits a device's parameters to its share by default, so that weights are sharded on both axes here too."""


@dataclass(frozen=True)
class Published:
    """``inputs``: the layout of tokens; ``layouts``: of a Llama's weights and stream; ``tensor``: whether products are tensor parallel on
    the second axis."""

    inputs: str
    layouts: KnownLayouts
    tensor: bool = False


LAYOUTS = {
    "FSDP": Published("S(0)", SHARDED),
    "FSDP x TP + sequence parallel": Published("S(0)R", BOTH, tensor=True),
    "DP x TP": Published("S(0)R", TENSOR, tensor=True),
}


def pins_of(name: str, graph: PlanningGraph, model: str) -> tuple[str, dict[str, str]]:
    """The layout of the inputs, and the pins. Raises ValueError for an unknown layout.

    An MPT runs as FSDP only: its weights and the results of its blocks are sharded by their first dim.
    """
    if name not in LAYOUTS or (model.startswith("mpt") and name != "FSDP"):
        raise ValueError(f"no layout {name!r} for {model}")
    one = LAYOUTS[name]
    if not model.startswith("mpt"):
        return one.inputs, one.layouts.pins(graph) | (dict(_tensor_parallel(graph)) if one.tensor else {})
    pins = {end.name: "S(0)" for end in graph.inputs_of("parameter")}
    blocks = (calls[0] for module, calls in graph.returned.items() if module.startswith("blocks.") and module.count(".") == 1)
    return one.inputs, pins | {node: "S(0)" for call in blocks for node in call if node is not None}


def _tensor_parallel(graph: PlanningGraph) -> Iterator[tuple[str, str]]:
    """Products with a column's weight give shards in the forward and pending sums in the backward, with a row's weight the reverse;
    gradients of weights are sharded as these are."""
    names = {end.node: end.name for end in graph.inputs_of("parameter")}
    used: set[str] = set()
    for node in (n for n in graph.nodes if str(n.target) == "fxshard.einsum.default"):
        weight = next((names[w.name] for w in map(_base, operands(node)) if w.name in names), "")
        for patterns, layouts in ((COLUMNS, ("S(0)S(2)", "S(0)P")), (ROWS, ("S(0)P", "S(0)S(2)"))):
            if any(fnmatch(weight, pattern) for pattern in patterns):
                yield node.name, layouts[weight in used]
        used.add(weight)
    for end, node in zip(graph.outputs, operands(graph.module.graph.output_node()), strict=True):
        for patterns, layout in ((COLUMNS, "PS(0)"), (ROWS, "PS(1)")):
            if end.kind == "gradient" and any(fnmatch(end.name, pattern) for pattern in patterns):
                yield _base(node).name, layout


def _base(value: fx.Node) -> fx.Node:
    while value.op == "call_function" and len(value.all_input_nodes) == 1 and str(value.target) != "fxshard.einsum.default":
        value = value.all_input_nodes[0]
    return value
