"""New nodes of a graph, without what takes most of the time of making one."""

from __future__ import annotations

from typing import Any

from torch import fx


def new_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> fx.Node:
    """``Graph.create_node``, which would look through the arguments for symbolic sizes."""
    if graph.owning_module is not None or name is None:
        node = graph.create_node(op, target, name=name)
        node.args, node.kwargs = args, kwargs
        return node
    names = graph._graph_namespace
    name = names.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node
