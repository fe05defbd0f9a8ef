"""flex_attention in a captured graph: as scaled_dot_product_attention if its mask is causal or absent and scores are not changed; else as
``fxshard::flex_attention``, whose functions are texts. varlen_attn, as ``fxshard::varlen_attention``."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.flex_attention import graph_of_mod, is_flex_attention, is_varlen_attention
from fxshard.errors import TraceError
from fxshard.graph.json_values import NotSerializable
from fxshard.graph.planning_graph import source_line
from fxshard.ops.flex.functions import PLACE, function_text
from fxshard.ops.sdpa.attention import lse_dtype


def expand_flex_attention(captured: fx.GraphModule) -> None:
    """Replaces each ``flex_attention`` of a Dynamo graph by ``scaled_dot_product_attention``, if that computes the same, or by
    ``fxshard::flex_attention``.

    Only the function of a block mask is used: its lists of blocks let a kernel skip work, and say nothing that the function does not.
    Raises TraceError for lists without a function, for a function that has no aten graph, and for a paged ``varlen_attn``.
    """
    packed = [n for n in captured.graph.nodes if is_varlen_attention(n.target)]
    for node in packed:
        node.args, node.target, node.kwargs = _varlen_arguments(node), torch.ops.fxshard.varlen_attention.default, {}
    calls = [n for n in captured.graph.nodes if is_flex_attention(n.target)]
    for node in calls:
        node.target, node.args = _as_one_node(captured, node)
    if calls:
        _drop_functions(captured)
    if calls or packed:
        captured.recompile()


def _as_one_node(captured: fx.GraphModule, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The function that takes the place of a call of ``flex_attention``, and its arguments."""
    given: list[Any] = [*node.args, (), ()]
    query, key, value, score_mod, mask, scale, _, score_reads, mask_reads = given[:9]
    kind = _mask_kind(_function(captured, mask[-1]))
    if kind == ALL and _several_blocks(mask):
        what = "flex_attention has a block mask of lists without a function, and torch's kernels would read the lists"
        raise TraceError(what, where=source_line(node), remedy="give BlockMask.from_kv_blocks a mask_mod that says what the lists say")
    if kind and _is_identity(_function(captured, score_mod)) and _only_output(node):
        return _scaled_dot_product_attention, (query, key, value, kind == CAUSAL, scale)
    texts = _text(captured, node, score_mod, score_reads, True), _text(captured, node, mask[-1], mask_reads, False)
    return _flex_attention, (query, key, value, list(score_reads), list(mask_reads), *texts, scale)


def _several_blocks(mask: Sequence[Any]) -> bool:
    """Whether the lists of a mask divide queries or keys; without a mask, torch makes one block of everything."""
    lists = [one.meta.get("example_value") for one in mask if isinstance(one, fx.Node)]
    return any(isinstance(one, torch.Tensor) and any(size != 1 for size in one.shape[2:]) for one in lists)


def _drop_functions(captured: fx.GraphModule) -> None:
    """Removes the graphs of functions, and other attributes, that nothing reads any more."""
    for node in reversed(list(captured.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            captured.graph.erase_node(node)
    captured.delete_all_unused_submodules()
    used = {n.target for n in captured.graph.nodes if n.op == "get_attr"}
    for name, _ in list(captured.named_buffers(recurse=False, remove_duplicate=False)):
        if name not in used:
            delattr(captured, name)


def _varlen_arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of ``fxshard::varlen_attention``."""
    given: list[Any] = [*node.args, *VARLEN[len(node.args) :]]
    q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window, _, used, table, splits = given[: len(VARLEN)]
    if table is not None or cu_k is None:
        what = f"varlen_attn is called with {'block_table' if table is not None else 'cu_seq_k=None'}: a paged cache is not planned"
        raise TraceError(what, where=source_line(node), remedy="gather the pages, and pass keys and values with cu_seq_k")
    left, right = window or (-1, -1)
    return q, k, v, cu_q, cu_k, used, max_q, max_k, scale, left, 0 if causal else right, splits


def _text(captured: fx.GraphModule, node: fx.Node, function: Any, reads: Sequence[Any], of_score: bool) -> str:
    """The text of a function that is an argument of ``node`` and reads these values besides the place of a score."""
    query: Any = node.args[0]
    example = query.meta["example_value"]
    with example.fake_mode:
        place = [torch.zeros((), dtype=torch.int64, device=example.device) for _ in range(PLACE)]
        score = [torch.zeros((), dtype=lse_dtype(example), device=example.device)] if of_score else []
        given = [_tensor(_example(captured, one)) for one in reads]
        module = graph_of_mod(captured.get_submodule(str(function.target)), [*score, *place, *given])
    try:
        return function_text(module)
    except NotSerializable as error:
        what = f"the {'score' if of_score else 'mask'}_mod of flex_attention calls {error}"
        remedy = "write it in functional operators of torch on its arguments and on tensors that it captures"
        raise TraceError(what, where=source_line(node), remedy=remedy) from None


def _example(captured: fx.GraphModule, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    return value.meta["example_value"] if "example_value" in value.meta else getattr(captured, str(value.target))


def _tensor(value: Any) -> torch.Tensor:
    """A number that a function reads, such as a dynamic size, as a tensor."""
    return value if isinstance(value, torch.Tensor) else torch.scalar_tensor(value, dtype=_dtype(value))


def _dtype(value: Any) -> torch.dtype:
    return torch.bool if isinstance(value, bool) else torch.float64 if isinstance(value, (float, torch.SymFloat)) else torch.int64


def _flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_reads: list[Any], mask_reads: list[Any], score: str, mask: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, logsumexp, greatest score) as torch's operator gives them, the last two as powers of two."""
    if k.shape[0] != q.shape[0]:
        k, v = (t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
    tensors = [[_tensor(one) for one in reads] for reads in (score_reads, mask_reads)]
    out, lse, most = torch.ops.fxshard.flex_attention(q, k, v, *tensors, None, None, None, score, mask, scale)
    return out, lse / math.log(2), most / math.log(2)


CAUSAL, ALL = "causal", "all"
VARLEN = (None,) * 7 + (False, None, None, False, None, None, None)
"""Defaults of the arguments of ``varlen_attn``'s operator; from torch 2.15 on one more follows, which kernel computes it."""
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
