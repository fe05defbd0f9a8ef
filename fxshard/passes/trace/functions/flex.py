"""flex_attention in a captured graph: as scaled_dot_product_attention if its mask is causal or absent and scores are not changed; else as
the plain operators of its math form, which have rules and a backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.flex_attention import flex_attention_in_plain_operators, is_flex_attention


def expand_flex_attention(captured: fx.GraphModule) -> None:
    """Replaces each ``flex_attention`` of a Dynamo graph by ``scaled_dot_product_attention``, if that computes the same, or by
    softmax(mask(score_mod(scale q k^T))) v, with all scores in memory.

    Only the function of a block mask is used: its lists of blocks let a kernel skip work, but do not change the result.
    """
    calls = [n for n in captured.graph.nodes if is_flex_attention(n.target)]
    if not calls:
        return
    for node in calls:
        query, key, value, score_mod, mask, *rest = node.args
        kind = _mask_kind(_function(captured, mask[-1]))
        if kind and _is_identity(_function(captured, score_mod)) and _only_output(node):
            node.target, node.args = _scaled_dot_product_attention, (query, key, value, kind == CAUSAL, rest[0])
        else:
            node.target, node.args = flex_attention_in_plain_operators(), (query, key, value, score_mod, (mask[-1],), *rest)
    for node in reversed(list(captured.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            captured.graph.erase_node(node)
    captured.delete_all_unused_submodules()
    used = {n.target for n in captured.graph.nodes if n.op == "get_attr"}
    for name, _ in list(captured.named_buffers(recurse=False, remove_duplicate=False)):
        if name not in used:
            delattr(captured, name)
    captured.recompile()


CAUSAL, ALL = "causal", "all"
COMPARISONS = {operator.ge: (2, 3), operator.le: (3, 2), torch.ge: (2, 3), torch.le: (3, 2)}
"""Comparisons of (batch, head, query, key) that are causal masks, by the positions of their operands."""


def _scaled_dot_product_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> tuple[Any, ...]:
    """The first result of ``flex_attention``; heads of q may share heads of k and v."""
    grouped = q.shape[1] != k.shape[1]
    return (torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped),)


def _function(captured: fx.GraphModule, node: Any) -> fx.Graph | None:
    """The graph of a function that is an argument of a node."""
    found = captured.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return found.graph if isinstance(found, fx.GraphModule) else None


def _mask_kind(graph: fx.Graph | None) -> str | None:
    """Which mask a function of (batch, head, query, key) is: CAUSAL, ALL for none, or None for another."""
    if graph is None:
        return None
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    if len(calls) != 1 or graph.output_node().args[0] is not calls[0] or len(inputs) != 4:
        return None
    (call,) = calls
    if call.op == "call_method" and call.target == "new_ones" and call.args[1:] == () and call.kwargs.get("size") == ():
        return ALL
    places = COMPARISONS.get(call.target) if call.op == "call_function" else None
    return CAUSAL if places is not None and call.args == tuple(inputs[i] for i in places) else None


def _is_identity(graph: fx.Graph | None) -> bool:
    """Whether a function of a score and its place returns the score."""
    return graph is not None and graph.output_node().args[0] is next(iter(graph.nodes))


def _only_output(node: fx.Node) -> bool:
    """Whether the logsumexp and the maximum of the scores are not used."""
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
