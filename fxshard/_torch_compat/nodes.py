"""Fast creation and inspection of graph nodes, without the most expensive parts of torch's functions.

What would replace it: ``Graph.create_node`` and ``Graph.lint``, were they as fast; a GraphModule that generates its code when called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _illegal_names, _name_regex

inputs_of: Callable[[fx.Node], Collection[fx.Node]] = attrgetter("_input_nodes")
"""``all_input_nodes``, which makes a list each time."""


def in_order(graph: fx.Graph) -> bool:
    """Whether each node belongs to the graph, has a unique name and comes after its operands: ``Graph.lint``, without error messages and
    without the check of the graph's tables."""
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        if node.graph is not graph or not seen.issuperset(inputs_of(node)):
            return False
        seen.add(node)
        names.add(node.name)
    return len(names) == len(seen)


class NodeMaker:
    """Creates nodes of a graph faster than ``Graph.create_node``, which searches the arguments for symbolic sizes, parses each name and
    hashes each operator in Python."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._alike: dict[int, tuple[Any, dict[fx.Node, None]]] = {}
        """The graph's table of the calls of a target, by the target's id; holds the target, so that its id is not reused."""

    def __call__(self, op: str, target: Any, args: Any, kwargs: Any, name: str | None, meta: Mapping[str, Any] | None = None) -> fx.Node:
        """A new node. ``meta`` updates ``node.meta``; assigning it would remove the node from the graph's tables and add it again."""
        graph = self.graph
        if graph.owning_module is not None or name is None:
            node = graph.create_node(op, target, name=name)
            node.args, node.kwargs = args, kwargs
        else:
            names = graph._graph_namespace
            name = _new_name(names, name)
            node = fx.Node(graph, name, op, target, args, kwargs)
            names.associate_name_with_obj(name, node)
            graph._insert(node)
            self._table(op, target)[node] = None
            graph._len += 1
        if meta is not None:
            node.meta.update(meta)
        return node

    def _table(self, op: str, target: Any) -> dict[fx.Node, None]:
        table = self.graph._find_nodes_lookup_table.table
        if op != "call_function":
            return table[op, None]
        found = self._alike.get(id(target))
        if found is None:
            found = self._alike[id(target)] = target, table[op, target]
        return found[1]


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
    """The base and number of a name; None for names that are reserved or not valid."""
    match = _name_regex.match(name)
    if match is None or name in _illegal_names:
        return None
    return match[1], None if match[2] is None else int(match[2])


def is_reserved(name: str) -> bool:
    """Whether graphs rename a node of this name: a keyword, a built-in function, or a name that generated code uses."""
    return name in _illegal_names


def lazy_graph_module(graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule that generates its Python code only when called, since interpreters never need it."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(torch.nn.Module(), graph)


def name_of_call(target: Any) -> str:
    """The default base of a node's name for a call of ``target``."""
    return re.sub("[^0-9a-zA-Z_]+", "_", torch.fx.Graph()._target_to_str(target))
