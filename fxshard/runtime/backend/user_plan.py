"""Applies a plan made by ``fxshard.plan`` to a Dynamo graph, whose inputs have another order and other names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.backend.dynamo_graph import DynamoGraph, trace_graph

KINDS = ("parameter", "buffer", "input")


def trace_for_plan(
    plan: ShardingPlan, graph: DynamoGraph, module: fx.GraphModule, tensors: Sequence[torch.Tensor]
) -> tuple[PlanningGraph, list[str]] | None:
    """(the graph traced with the inputs of ``plan`` in its order, its names of ``tensors``); None if ``plan`` is for another graph."""
    places = graph.tensor_places
    names, kinds = [graph.names[i] for i in places], [graph.kinds[i] for i in places]
    ends = [end for end in plan.inputs if end.kind in KINDS]
    inputs = sorted((i for i, kind in enumerate(kinds) if kind == "input"), key=lambda i: graph.arguments[places[i]])
    if len(ends) != len(names) or sum(end.kind == "input" for end in ends) != len(inputs):
        return None
    in_turn = iter(inputs)
    order = [next(in_turn) if end.kind == "input" else names.index(end.name) if end.name in names else -1 for end in ends]
    if sorted(order) != list(range(len(names))):
        return None
    renamed = dict(zip(order, (end.name for end in ends), strict=True))
    moved = _reordered(module, order)
    traced = trace_graph(moved, [tensors[i] for i in order], [end.name for end in ends], [kinds[i] for i in order])
    return (traced, [renamed[i] for i in range(len(names))]) if traced.hash == plan.graph_hash else None


def _reordered(module: fx.GraphModule, order: Sequence[int]) -> fx.GraphModule:
    """A copy whose placeholders are in ``order``."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in [*(placeholders[i] for i in order), *(n for n in module.graph.nodes if n.op not in ("placeholder", "output"))]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(module.graph.output_node().args[0], copies.__getitem__))
    return fx.GraphModule(module, graph)
