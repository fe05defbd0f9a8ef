"""Common-subexpression elimination: merges equal calls of aten operators in one graph, but no collectives.

The local forms of operators such as softmax contain equal calls, which Inductor would compute twice. Forward and backward are separate,
because the backward recomputes values by choice. torch's own pass would also merge collectives, whose number must be the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import fx

from fxshard._torch_compat import OpOverload, pytree
from fxshard._torch_compat.fakes import storage_key
from fxshard._torch_compat.operators import schema_of
from fxshard.passes.after_lowering.forward_backward import returned
from fxshard.runtime.rank_graph.partition import Partition

PURE = frozenset({"aten", "prims"})


def merge_equal_calls(module: fx.GraphModule, results: int | None = None) -> int:
    """Merges equal calls of ``module``, in place. Returns the number of calls removed.

    ``results``: how many of the returned values go to the caller (by default all); the others are saved for the backward.
    """
    graph, seen, dropped = module.graph, dict[Hashable, fx.Node](), 0
    if any(map(_may_mutate, graph.nodes)):  # a call might mutate one of two equal values
        return 0
    own = {storage_key(n.meta["val"]) for n in returned(graph)[:results] if isinstance(n, fx.Node) and _is_dense(n)}
    for node in list(graph.nodes):
        if not _is_pure(node) or not _is_dense(node) or storage_key(node.meta["val"]) in own:
            continue  # results that the caller gets must not share memory
        first = seen.setdefault(_call_signature(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            dropped += 1
    if dropped:
        graph.lint()
        module.recompile()
    return dropped


def merge_equal_in_halves(parts: Partition, results: int) -> tuple[Partition, int]:
    """Merges equal calls of both halves, in place, and saves merged values once. Returns (the halves, the number of calls removed).

    ``results``: how many of the forward's returned values go to the caller.
    """
    dropped = merge_equal_calls(parts.forward, results)
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
    return replace(parts, kept=len(once)), dropped + merge_equal_calls(parts.backward)


def _is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _is_pure(node: fx.Node) -> bool:
    """Whether the call always gives the same result: no random numbers, no uninitialised memory."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in PURE:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and "empty" not in target.name()


def _may_mutate(node: fx.Node) -> bool:
    """Whether a call may mutate an operand; assumed for calls without a schema, such as a user's kernel."""
    if node.op != "call_function" or getattr(node.target, "__module__", None) == "_operator":
        return False
    schema = schema_of(node.target)
    return schema is None or schema.is_mutable


def _call_signature(node: fx.Node) -> Hashable:
    """The target and arguments of a call, with their types: 1 differs from 1.0, and 0.0 from -0.0."""
    flat, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return node.target, str(spec), tuple(x if isinstance(x, fx.Node) else (type(x), repr(x)) for x in flat)
