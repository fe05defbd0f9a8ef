"""Where the nodes of a planning graph come from, as plain data: the values that each reads, and the module whose forward made it."""

from __future__ import annotations

import re

from torch import fx

from fxshard.graph.planning_graph import PlanningGraph, operands, planned_nodes, producer

STACKS = ("nn_module_stack", "fwd_nn_module_stack")
"""Metadata of nodes with the modules that call them: that of the forward, and for a node of the backward, of its forward's node."""


def reads_of(graph: PlanningGraph) -> dict[str, tuple[str, ...]]:
    """For each planned node that reads something, its operands in order: the name of the producer, ``name[k]`` for one of several results."""
    known: dict[str, tuple[str, ...]] | None = graph.cache.get("reads")
    if known is None:
        known = graph.cache["reads"] = {n.name: tuple(map(_value, read)) for n in planned_nodes(graph) if (read := operands(n))}
    return known


def module_paths(graph: PlanningGraph) -> dict[str, str]:
    """For each call made in a submodule's forward, or in the backward of one: the name of the innermost module."""
    known: dict[str, str] | None = graph.cache.get("modules")
    if known is None:
        calls = (n for n in planned_nodes(graph) if n.op == "call_function")
        known = graph.cache["modules"] = {n.name: path for n in calls if (path := module_path(n))}
    return known


def module_path(node: fx.Node) -> str:
    """The innermost submodule in whose forward, or in the backward of whose forward, the node is; empty if it is in none."""
    stack = next((found for name in STACKS if (found := node.meta.get(name))), {})
    return next((re.sub(r"^[LG]\['\w+'\]\.?", "", path) for path, _ in reversed(stack.values())), "")


def _value(node: fx.Node) -> str:
    source, index = producer(node)
    return source.name if source is node else f"{source.name}[{index}]"
