"""Calls of DTensor's API within a checkpointed block: the block's operators move into the graph, marked to be recomputed.

Which values are local is a question to the whole graph. Blocks without such calls stay as they are.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dynamo.modules import CHECKPOINTS
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import source_line
from fxshard.runtime.backend.graph_calls import dtensor_calls_in


def inline_checkpoints(graph: fx.Graph) -> None:
    """Inlines, in a graph with Dynamo's example values, all checkpointed blocks if one of them calls DTensor's API.

    Raises TraceError, with the user's line, for such calls in another block (a loop, a branch), or under a policy of the user.
    """
    blocks = {n: body for n in graph.find_nodes(op="get_attr") if isinstance(body := _attribute(graph, n), fx.GraphModule)}
    for body in blocks.values():
        inline_checkpoints(body.graph)
    nested = {node: next(iter(dtensor_calls_in(body.graph)), None) for node, body in blocks.items()}
    if not any(nested.values()):
        return
    for node, body in blocks.items():
        simple = "_checkpoint_context_fn" not in body.meta and all(user.target in CHECKPOINTS for user in node.users)
        call = nested[node]
        if call is not None and not simple:
            what = "DTensor's functions are called in a loop, a branch, or a block with a policy for selective checkpointing"
            raise TraceError(what, where=source_line(call), remedy="call them before or after the block")
        if simple:
            for user in list(node.users):
                _inline(graph, user, body.graph)
            graph.erase_node(node)


def _attribute(graph: fx.Graph, node: fx.Node) -> Any:
    return getattr(graph.owning_module, str(node.target), None)


def _inline(graph: fx.Graph, call: fx.Node, body: fx.Graph) -> None:
    """Replaces the checkpoint ``call`` by the operators of ``body``."""
    values: dict[fx.Node, Any] = dict(zip(body.find_nodes(op="placeholder"), call.args[1:], strict=True))
    block = 1 + max((node.meta.get("ac_graph_id", -1) for node in graph.nodes), default=-1)  # in the graph, equal on all ranks
    with graph.inserting_before(call):
        for node in body.nodes:
            if node.op not in ("placeholder", "output"):
                copied = values[node] = graph.node_copy(node, values.__getitem__)
                copied.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": block}
    results = pytree.tree_map_only(fx.Node, values.__getitem__, body.output_node().args[0])
    for user in list(call.users):
        assert user.target is operator.getitem, "the results of a checkpointed block are a tuple"
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
