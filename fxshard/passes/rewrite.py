"""New local graphs from old ones, for the passes after lowering: programs are not changed, they are made anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import lazy_graph_module, pytree
from fxshard.passes.local_graph import FAKES, KEPT
from fxshard.planning_graph import is_getitem


def rebuilt(module: fx.GraphModule, calls: Iterable[fx.Node]) -> fx.GraphModule:
    """A copy of a local graph whose calls stand in this order, parts of a result right behind it; names and metas are kept."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")]
    for node in (*inputs, *calls, module.graph.output_node()):
        for one in (node, *filter(is_getitem, node.users)):
            if one not in copies:
                copies[one] = graph.node_copy(one, copies.__getitem__)
    return lazy_graph_module(graph)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be changed."""
    return rebuilt(module, [n for n in module.graph.nodes if n.op == "call_function"])


_RESULTS: dict[Any, Any] = {}
"""By operator, shapes, strides, dtypes and constants: layers repeat."""


def _result(target: Any, args: Any, kwargs: Any) -> Any:
    """The fake value of a call on nodes."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (target, spec, tuple(map(_key, leaves)))
    if key not in _RESULTS:
        if len(_RESULTS) > 50_000:
            _RESULTS.clear()
        values, keywords = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with FAKES, torch.no_grad():
            _RESULTS[key] = target(*values, **keywords)
    return _RESULTS[key]


def _key(value: Any) -> Any:
    """Constants keep their type: 1, 1.0 and True are different arguments."""
    tensor = value.meta["val"] if isinstance(value, fx.Node) else None
    return (type(value), value) if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Emitter:
    """Adds calls to a local graph right before ``place``; they are of the same half of the step and, unless said otherwise, its turn."""

    def __init__(self, graph: fx.Graph, place: fx.Node, turn: int | None = None) -> None:
        self.graph, self.place = graph, place
        self.kept = {k: place.meta[k] for k in KEPT if k in place.meta}
        self.turn = place.meta.get("turn", 0) if turn is None else turn

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {**self.kept, "val": _result(target, args, kwargs), "turn": self.turn}
        return node
