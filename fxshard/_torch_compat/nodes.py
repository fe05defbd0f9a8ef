"""New nodes of a graph, without what takes most of the time of making one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import fx
from torch.fx.graph import _illegal_names, _name_regex


def new_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None) -> fx.Node:
    """``Graph.create_node``, which would look through the arguments for symbolic sizes, and take each name apart."""
    if graph.owning_module is not None or name is None:
        node = graph.create_node(op, target, name=name)
        node.args, node.kwargs = args, kwargs
        return node
    names = graph._graph_namespace
    name = _new_name(names, name)
    node = fx.Node(graph, name, op, target, args, kwargs)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def _new_name(names: Any, name: str) -> str:
    """``names.create_name(name, None)``."""
    parts = _parts(name)
    if parts is None:
        found: str = names.create_name(name, None)
        return found
    base, number = parts
    if number is None or name in names._used_names:
        number = names._base_count.get(base, 0)
        while name in names._used_names:
            number += 1
            name = f"{base}_{number}"
    names._used_names.add(name)
    names._base_count[base] = number
    return name


@lru_cache(maxsize=65536)
def _parts(name: str) -> tuple[str, int | None] | None:
    """What a name begins with and its number; None for names that Python keeps for itself, or that are none."""
    match = _name_regex.match(name)
    if match is None or name in _illegal_names:
        return None
    return match[1], None if match[2] is None else int(match[2])
