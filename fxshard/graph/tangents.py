"""The tangents on which each gradient depends. If the loss uses no output behind them, autograd gives None for it, not zeros."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fxshard.graph.planning_graph import GraphOutput, PlanningGraph


def outputs_with_tangents(graph: PlanningGraph) -> tuple[GraphOutput, ...]:
    """``graph.outputs``, the gradients with the tangents that they follow from; None for those of all tangents, or of none."""
    tangents = [end for end in graph.inputs if end.kind == "tangent"]
    bits = {end.node: 1 << i for i, end in enumerate(tangents)}
    found: dict[fx.Node, int] = {}
    for node in graph.module.graph.nodes:
        found[node] = bits.get(node.name, 0)
        for one in node.all_input_nodes:
            found[node] |= found[one]
    results = graph.module.graph.output_node().args[0]
    return tuple(_following(end, found[result], [t.name for t in tangents]) for end, result in zip(graph.outputs, results, strict=True))


def _following(end: GraphOutput, mask: int, names: list[str]) -> GraphOutput:
    if end.kind != "gradient" or not mask or mask == (1 << len(names)) - 1:
        return end
    return replace(end, follows=tuple(name for i, name in enumerate(names) if mask >> i & 1))
