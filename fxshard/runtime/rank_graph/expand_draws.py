"""expand_draws: replaces the opaque nodes of masks and uniform numbers by int32 arithmetic, which a compiler fuses with its users.

This runs after partitioning: a partitioner that saw the arithmetic would cut through it and save intermediate values. As one node, a mask
is recomputed in the backward instead of saved. Other draws stay operators. One operator computes the keys of all draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fxshard._torch_compat.inductor.inductor import inductor_decompositions
from fxshard._torch_compat.operators import named_arguments
from fxshard.ops import random
from fxshard.ops.counter import keys_of_tensor

MASK, DRAW = torch.ops.fxshard.keep_mask.default, torch.ops.fxshard.random_shard.default


def prefer_recompute_of_masks(module: fx.GraphModule) -> None:
    """Marks masks for recomputation in the backward: fused with their users, that costs less than to write and read them."""
    for node in module.graph.nodes:
        if node.target is MASK and _can_expand(node):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE


def expand_draws(module: fx.GraphModule, keys_too: bool = False) -> int:
    """Replaces draws of ``module`` by their arithmetic, in place. Returns their number. ``keys_too``: also the operator that computes keys,
    which needs Python."""
    graph = module.graph
    draws = {n: named_arguments(n.target, n.args, n.kwargs) for n in graph.nodes if n.target in (MASK, DRAW) and _can_expand(n)}
    keys: dict[fx.Node, _Keys] = {}
    for node, given in draws.items():
        seed = given["seed"]
        if seed not in keys:
            keys[seed] = _Keys(graph, seed, [a["call"] for a in draws.values() if a["seed"] is seed], node.meta["val"].device, keys_too)
    traced: dict[Any, fx.GraphModule] = {}
    for node, given in draws.items():
        with graph.inserting_before(node):
            (result,) = _inlined(graph, *_draw_graph(node, given, keys[given["seed"]], traced))
        result.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    if draws:
        graph.lint()
        module.recompile()
    return len(draws)


def _can_expand(node: fx.Node) -> bool:
    given = named_arguments(node.target, node.args, node.kwargs)
    kind = "kept" if node.target is MASK else given["kind"]
    return given["rng"] == random.GENERATORS[0] and random.is_fusible(kind, list(map(_value, given["shape"])), node.meta["val"].dtype)


def _value(number: int | fx.Node) -> Any:
    """A dynamic size is a node of the graph."""
    return number.meta["val"] if isinstance(number, fx.Node) else number


class _Keys:
    """The keys of the draws of a graph under one seed, computed together: int32 [2, draws]."""

    def __init__(self, graph: fx.Graph, seed: fx.Node, calls: Sequence[int], device: torch.device, expanded: bool) -> None:
        self.first, count = min(calls), max(calls) - min(calls) + 1
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            if expanded:
                traced = _traced(lambda given: (keys_of_tensor(given, self.first, count).to(device),), [seed])
                (self.words,) = _inlined(graph, traced, [seed])
                return
            self.words = _call(graph, torch.ops.fxshard.draw_keys.default, seed, self.first, count, device)

    def of(self, graph: fx.Graph, call: int) -> list[fx.Node]:
        """The two words of one draw."""
        select = torch.ops.aten.select.int
        rows = [_call(graph, select, self.words, 0, i) for i in range(2)]
        return [_call(graph, select, row, 0, call - self.first) for row in rows]


def _call(graph: fx.Graph, target: Any, first: fx.Node, *args: Any) -> fx.Node:
    """A new call with its fake value; ``first`` is its only operand that is a node."""
    node = graph.call_function(target, (first, *args))
    with first.meta["val"].fake_mode:
        node.meta["val"] = target(first.meta["val"], *args)
    return node


def _draw_graph(
    node: fx.Node, given: Mapping[str, Any], keys: _Keys, traced: dict[Any, fx.GraphModule]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """(the graph of a draw, its operands); draws that differ only in keys and offsets share one traced graph."""
    value = node.meta["val"]
    kind, low, high = ("kept", given["p"], 0) if node.target is MASK else (given["kind"], given["low"], given["high"])
    shape, sizes, cut = tuple(given["shape"]), tuple(given["sizes"]), tuple(given["cut"])

    dynamic = list(dict.fromkeys(n for n in (*shape, *sizes) if isinstance(n, fx.Node)))

    def drawn(first: torch.Tensor, second: torch.Tensor, *rest: Any) -> tuple[torch.Tensor]:
        starts, known = rest[: len(cut)], dict(zip(dynamic, rest[len(cut) :], strict=True))
        whole, own = ([known.get(n, n) for n in numbers] for numbers in (shape, sizes))
        offsets = random.offsets_of(len(whole), cut, starts)
        return (random.draw_shard(kind, low, high, whole, value.dtype, (first, second), own, offsets, value.device).contiguous(),)

    reads = [*keys.of(node.graph, given["call"]), *given["offsets"], *dynamic]
    form = (kind, low, high, shape, sizes, cut, value.dtype, value.device)
    if form not in traced:
        traced[form] = _traced(drawn, reads)
    return traced[form], reads


def _traced(function: Callable[..., Any], reads: Sequence[fx.Node]) -> fx.GraphModule:
    """``function`` traced on the values of ``reads``, decomposed to the operators that Inductor lowers."""
    values = [n.meta["val"] for n in reads]
    with values[0].fake_mode, torch.no_grad():
        return make_fx(function, decomposition_table=inductor_decompositions())(*values)


def _inlined(graph: fx.Graph, module: fx.GraphModule, reads: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Copies ``module`` to the insertion point of ``graph``, with the operands ``reads``; returns its results."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    return tuple(graph.graph_copy(module.graph, dict(zip(placeholders, reads, strict=True))))
