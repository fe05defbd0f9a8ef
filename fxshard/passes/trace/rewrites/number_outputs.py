"""Turns numbers that a model computes and returns (``x.sum().item()``) into 0-dim tensors, because a graph returns tensors only."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxshard._torch_compat.aot import PlainAOTOutput
from fxshard._torch_compat.fakes import FakeTensor

DTYPES = ((torch.SymBool, torch.bool), (torch.SymInt, torch.int64), (torch.SymFloat, torch.float64))


def tensors_of_numbers(joint: fx.GraphModule) -> frozenset[int]:
    """Rewrites the outputs that are numbers; returns their indices among the model's outputs."""
    output = joint.graph.output_node()
    values, places = list(output.args[0]), set()
    for i, (value, desc) in enumerate(zip(values, output.meta["desc"], strict=True)):
        dtype = next((d for kind, d in DTYPES if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), kind)), None)
        if dtype is not None and isinstance(desc, PlainAOTOutput):
            with joint.graph.inserting_before(output):
                values[i] = joint.graph.call_function(torch.ops.aten.scalar_tensor.default, (value,), {"dtype": dtype})
            values[i].meta["val"] = _fake(joint.graph, dtype)
            places.add(desc.idx)
    output.args = (tuple(values),)
    return frozenset(places)


def drop_wrong_bounds(joint: fx.GraphModule) -> None:
    """Removes torch's upper bound on the result size of masked_select: it is the size of the first operand, too small if the mask
    broadcasts it to more elements."""
    for select in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_select.default):
        x, mask = (n.meta["val"].shape for n in select.args)
        if x != mask:
            for check in [u for size in select.users for le in size.users if le.target is operator.le for u in le.users]:
                joint.graph.erase_node(check)


def _fake(graph: fx.Graph, dtype: torch.dtype) -> torch.Tensor:
    """A 0-dim fake in the graph's fake mode; the graph has a fake, because a number is computed from some tensor."""
    mode = next(v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor))
    with mode:
        return torch.empty((), dtype=dtype)
