"""Builds new local graphs from old ones, for the passes after lowering; programs are never modified."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from fxshard._torch_compat.nodes import NodeMaker, lazy_graph_module
from fxshard.graph.planning_graph import is_getitem, is_tensor
from fxshard.passes.lowering.local_graph import INHERITED_META, call_prefix, fake_result


def rebuilt(module: fx.GraphModule, calls: Iterable[fx.Node]) -> fx.GraphModule:
    """A copy of a local graph with its calls in this order, each followed by its getitems; names and metadata stay."""
    graph = fx.Graph()
    new = NodeMaker(graph)
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")]
    for node in (*inputs, *calls, module.graph.output_node()):
        for one in (node,) if is_tensor(node) else (node, *filter(is_getitem, node.users)):
            if one not in copies:
                args, kwargs = fx.map_arg((one.args, one.kwargs), copies.__getitem__)
                copies[one] = new(one.op, one.target, args, kwargs, one.name, one.meta)
    return lazy_graph_module(graph)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be modified."""
    return rebuilt(module, [n for n in module.graph.nodes if n.op == "call_function"])


class Emitter:
    """Inserts calls right before ``place``; they inherit its metadata and, unless ``turn`` is given, its turn.

    ``half``: the nodes of one half of the step; new nodes are added to it if ``place`` is in it.
    """

    def __init__(self, graph: fx.Graph, place: fx.Node, turn: float | None = None, half: set[fx.Node] | None = None) -> None:
        self.graph, self.place, self.new = graph, place, NodeMaker(graph)
        self.half = half if half is not None and place in half else set[fx.Node]()
        self.kept = {k: place.meta[k] for k in INHERITED_META if k in place.meta}
        self.turn = place.meta.get("turn", 0) if turn is None else turn

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.place):
            node = self.new("call_function", target, args, kwargs, call_prefix(target), self.kept)
        node.meta.update(val=fake_result(target, args, kwargs), turn=self.turn)
        self.half.add(node)
        return node
