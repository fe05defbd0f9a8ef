"""Turns operators with side effects, such as assertions, back into plain calls: AOTAutograd orders them by effect tokens.

A graph runs in order, so no tokens are needed. ``torch.fx.has_side_effect`` keeps the calls from being removed as dead code.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.aot import TOKEN_INPUTS, TOKEN_OUTPUTS
from fxshard._torch_compat.operators import schema_of


def drop_tokens(joint: fx.GraphModule) -> None:
    """Unwraps every ``with_effects(token, operator, *args)`` and removes the tokens from the graph's inputs and outputs."""
    for node in list(joint.graph.nodes):
        if node.target is torch.ops.higher_order.with_effects:
            _unwrap(joint.graph, node)
    output = joint.graph.output_node()
    kept = [(v, d) for v, d in zip(output.args[0], output.meta["desc"], strict=True) if not isinstance(d, TOKEN_OUTPUTS)]
    output.args = (tuple(v for v, _ in kept),)
    output.meta["desc"] = [d for _, d in kept]
    for node in joint.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("desc"), TOKEN_INPUTS):
            joint.graph.erase_node(node)


def _unwrap(graph: fx.Graph, node: fx.Node) -> None:
    token, target, *args = node.args
    torch.fx.has_side_effect(target)
    with graph.inserting_before(node):
        call = graph.call_function(target, tuple(args), dict(node.kwargs))
    results = tuple(node.meta["val"])[1:]
    schema = schema_of(target)
    single = schema is not None and len(schema.returns) == 1
    call.meta = {**node.meta, "val": results[0] if single else results or None}
    for user in list(node.users):
        place: Any = user.args[1]
        if place == 0 or single:
            user.replace_all_uses_with(token if place == 0 else call)
            graph.erase_node(user)
        else:
            user.args = (call, place - 1)
            user.target = operator.getitem
    graph.erase_node(node)
