"""flex_kernels: fused attention of a rank's graph as torch's operator, whose functions are graphs that Inductor puts in its kernel."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.flex_attention import (
    block_mask_entries,
    differentiable_index,
    flex_operators,
    graph_of_mod,
    joint_graph_of_score,
    scalars_of_score,
)
from fxshard.ops.flex.fused import Call
from fxshard.runtime.compile.cuts import FUSED_FLEX

OPTIONS = {"BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True}
"""The defaults of ``flex_attention``'s kernel options."""


def use_flex_kernels(module: fx.GraphModule) -> int:
    """Replaces the operators ``flex_attention_fused`` of a graph, and of its backward, in place; returns how many there were."""
    forward, backward = (module.graph.find_nodes(op="call_function", target=target) for target in FUSED_FLEX)
    for node in forward:
        _replace_forward(module, node)
    for node in backward:
        _replace_backward(module, node)
    if forward or backward:
        module.graph.lint()
        module.recompile()
    return len(forward) + len(backward)


def _replace_forward(module: fx.GraphModule, node: fx.Node) -> None:
    q, k, v, score_tensors, mask_tensors, *offsets, lists, score, mask, scale = node.args
    call = Call(str(score), str(mask), _list(score_tensors), _list(mask_tensors), offsets)
    read = {user.args[1] for user in node.users}
    options = {**OPTIONS, "OUTPUT_LOGSUMEXP": 1 in read, "OUTPUT_MAX": 2 in read}
    with module.graph.inserting_before(node), _mode(q):
        scalars = scalars_of_score(_value(q), grad=False)
        of_score = _graph(module, "flex_score", graph_of_mod(call.score, [*scalars, *map(_value, call.score_reads)]))
        blocks = _blocks(module, call, q, k, lists)
        given = (q, k, v, of_score, blocks, scale, options, call.score_reads, call.mask_reads)
        new = module.graph.call_function(flex_operators()[0], given)
    _take_place(module, node, new)


def _replace_backward(module: fx.GraphModule, node: fx.Node) -> None:
    grad, grad_lse, q, k, v, out, lse, score_tensors, mask_tensors, *offsets, lists, score, mask, scale, wanted = node.args
    call = Call(str(score), str(mask), _list(score_tensors), _list(mask_tensors), offsets, differentiable_index())
    graded = [call.first + i for i in _list(wanted)]
    with module.graph.inserting_before(node), _mode(q):
        reads = [_value(read).detach().requires_grad_(i in graded) for i, read in enumerate(call.score_reads)]
        scalars = scalars_of_score(_value(q), grad=True)
        joint = _graph(module, "flex_joint", joint_graph_of_score(call.score, scalars, reads))
        of_score = _graph(module, "flex_score", graph_of_mod(call.score, [x.detach() for x in (*scalars, *reads)]))
        blocks = _blocks(module, call, q, k, lists)
        given = (q, k, v, out, lse, grad, grad_lse, of_score, joint, blocks, scale, OPTIONS, call.score_reads, call.mask_reads)
        new = module.graph.call_function(flex_operators()[1], given)
        values = node.meta["val"]
        new.meta = {
            **node.meta,
            "val": (*values[:3], tuple(values[3 + graded.index(i)] if i in graded else None for i in range(len(reads)))),
        }
        others = module.graph.call_function(operator.getitem, (new, 3))
        others.meta["val"] = new.meta["val"][3]
    for user in list(node.users):
        index = user.args[1]
        user.args = (new, index) if index < 3 else (others, graded[index - 3])
    if not others.users:
        module.graph.erase_node(others)
    module.graph.erase_node(node)


def _blocks(module: fx.GraphModule, call: Call, q: Any, k: Any, lists: Any) -> tuple[Any, ...]:
    place = scalars_of_score(_value(q), grad=False)[1:]
    of_mask = _graph(module, "flex_mask", graph_of_mod(call.mask, [*place, *map(_value, call.mask_reads)]))
    return block_mask_entries(_value(q).shape[2], _value(k).shape[2], lists, of_mask)


def _graph(module: fx.GraphModule, name: str, graph: fx.GraphModule) -> fx.Node:
    """A new attribute of ``module``, read at the point of insertion."""
    unique = next(n for i in itertools.count() if not hasattr(module, n := f"{name}_{i}"))
    module.add_module(unique, graph)
    return module.graph.get_attr(unique)


def _take_place(module: fx.GraphModule, node: fx.Node, new: fx.Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def _mode(node: Any) -> Any:
    return node.meta["val"].fake_mode


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _list(value: Any) -> list[Any]:
    return list(value)
