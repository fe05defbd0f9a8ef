"""merge: equal calls of aten operators in one graph become one, as torch's own compiler makes them, but for collectives.

Operators whose local form has several parts, a softmax for one, say the same twice. Inductor then computes it twice, where it keeps what
two read. Forward and backward each for itself: what is computed again in the backward is so by choice. The pass that
torch's own compiler has for that would merge collectives, which ranks must issue one for one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import fx

from fxshard._torch_compat import OpOverload, pytree, schema_of, storage_key
from fxshard.passes.after_lowering.forward_backward import returned
from fxshard.runtime.rank_graph.partition import Partition

PURE = frozenset({"aten", "prims"})


def merge_equal(module: fx.GraphModule, results: int | None = None) -> int:
    """Merges equal calls of ``module``, in place. Returns how many were dropped.

    ``results``: how many of the values that it returns somebody gets (all by default); the others are kept for the backward.
    """
    graph, seen, dropped = module.graph, dict[Hashable, fx.Node](), 0
    if any(map(_writes, graph.nodes)):  # of two equal values one may be written into
        return 0
    own = {storage_key(n.meta["val"]) for n in returned(graph)[:results] if isinstance(n, fx.Node) and _is_dense(n)}
    for node in list(graph.nodes):
        if not _is_pure(node) or not _is_dense(node) or storage_key(node.meta["val"]) in own:
            continue  # what somebody gets stays a tensor of its own
        first = seen.setdefault(_said(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            dropped += 1
    if dropped:
        graph.lint()
        module.recompile()
    return dropped


def merge_halves(parts: Partition, results: int) -> tuple[Partition, int]:
    """Merges equal calls of both halves, in place, and keeps what became one value once; the parts, and how many calls were dropped.

    ``results``: how many of the forward's values somebody gets.
    """
    dropped = merge_equal(parts.forward, results)
    values = returned(parts.forward.graph)
    places = parts.backward.graph.find_nodes(op="placeholder")[len(parts.kept_inputs) :]
    once: dict[fx.Node, fx.Node] = {}
    for value, place in zip(values[results:], places, strict=False):
        first = once.setdefault(value, place)
        if first is not place:
            place.replace_all_uses_with(first)
            parts.backward.graph.erase_node(place)
    parts.forward.graph.output_node().args = ((*values[:results], *once),)
    parts.forward.recompile()
    parts.backward.recompile()
    return replace(parts, kept=len(once)), dropped + merge_equal(parts.backward)


def _is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _is_pure(node: fx.Node) -> bool:
    """Whether the call gives the same each time: no random numbers, no memory as it is found."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in PURE:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and "empty" not in target.name()


def _writes(node: fx.Node) -> bool:
    """Whether a call may write into what it is given; what has no schema, as a user's kernel, may."""
    if node.op != "call_function" or getattr(node.target, "__module__", None) == "_operator":
        return False
    schema = schema_of(node.target)
    return schema is None or schema.is_mutable


def _said(node: fx.Node) -> Hashable:
    """The call as it is written, with the kind of each argument: 1 is not 1.0, and 0.0 not -0.0."""
    flat, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return node.target, str(spec), tuple(x if isinstance(x, fx.Node) else (type(x), repr(x)) for x in flat)
