"""Replaces ``as_strided``, which addresses memory and so has no meaning for shards, by operators on elements.

A value without gaps in memory becomes contiguous if its dims are permuted into the order of its strides. If the new strides leave no gaps
either, ``as_strided`` is a reshape between two permutations. Otherwise it indexes the flattened value at offset + sum_d i_d stride_d.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.fakes import storage_key
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import source_line

aten = torch.ops.aten


def replace_as_strided(joint: fx.GraphModule) -> None:
    """Replaces ``as_strided`` and ``as_strided_scatter``; raises TraceError for one that addresses memory outside the graph's values."""
    for node in list(joint.graph.nodes):
        if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            with joint.graph.inserting_before(node):
                result = (_read if node.target is aten.as_strided.default else _write)(_Maker(joint.graph, node), node)
            node.replace_all_uses_with(result)
            joint.graph.erase_node(node)


def _read(make: _Maker, node: fx.Node) -> fx.Node:
    base = _base(node.args[0], node)
    size, stride, offset = _strides(node, 1)
    order = filling(base.meta["val"].shape, base.meta["val"].stride())
    assert order is not None
    memory = make.permuted(base, order)
    target = filling(size, stride)
    if target is None or offset or node.meta["val"].numel() != base.meta["val"].numel():
        return make(aten.index.Tensor, make.reshaped(memory, [-1]), [make.places(size, stride, offset)])
    return make.permuted(make.reshaped(memory, [size[d] for d in target]), inverse(target))


def _write(make: _Maker, node: fx.Node) -> fx.Node:
    """``as_strided_scatter``: the base with the elements that the strides address replaced by the source."""
    base, source = _base(node.args[0], node), node.args[1]
    if base is not node.args[0]:
        raise _hidden(node)
    size, stride, offset = _strides(node, 2)
    shape = base.meta["val"].shape
    order = filling(shape, base.meta["val"].stride())
    assert order is not None
    target = filling(size, stride)
    if target is None or offset or source.meta["val"].numel() != base.meta["val"].numel():
        flat = make.reshaped(make.permuted(base, order), [-1])
        memory = make(aten.index_put.default, flat, [make.places(size, stride, offset)], source)
    else:
        memory = make.permuted(source, target)
    return make.permuted(make.reshaped(memory, [shape[d] for d in order]), inverse(order))


def _strides(node: fx.Node, first: int) -> tuple[list[int], list[int], int]:
    size, stride, offset = (*node.args[first:], None)[:3]
    return list(size), list(stride), node.args[0].meta["val"].storage_offset() if offset is None else offset


def filling(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dims from outermost to innermost in memory; None if the elements overlap or leave gaps."""
    order = sorted(range(len(size)), key=lambda d: (size[d] != 1, -stride[d], d))
    step = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != step:
            return None
        step *= size[d]
    return order


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes ``order``."""
    return [order.index(d) for d in range(len(order))]


def _base(value: fx.Node, node: fx.Node) -> fx.Node:
    """``value`` or the value of which it is a view: the node whose tensor covers the whole storage."""
    memory = storage_key(value.meta["val"])
    while True:
        tensor = value.meta["val"]
        full = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if full and filling(tensor.shape, tensor.stride()) is not None:
            return value
        sources = [n for n in value.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        sources = [n for n in sources if storage_key(n.meta["val"]) == memory]
        if not sources:
            raise _hidden(node)
        value = sources[0]


def _hidden(node: fx.Node) -> TraceError:
    return TraceError(
        f"{node.target} reaches memory that no value of the graph holds",
        where=source_line(node) or node.name,
        remedy="use slices, views or torch.Tensor.unfold instead of as_strided",
    )


class _Maker:
    """Adds calls in place of a node, with its meta and their own fake values."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        call = self.graph.call_function(target, args, kwargs)
        with self.node.meta["val"].fake_mode:
            value = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        call.meta = {**self.node.meta, "val": value}
        return call

    def permuted(self, x: fx.Node, order: list[int]) -> fx.Node:
        return x if order == sorted(order) else self(aten.permute.default, x, order)

    def reshaped(self, x: fx.Node, shape: list[int]) -> fx.Node:
        shape = [x.meta["val"].numel()] if shape == [-1] else shape
        return x if list(x.meta["val"].shape) == shape else self(aten.reshape.default, x, shape)

    def places(self, size: list[int], stride: list[int], offset: int) -> fx.Node:
        """The memory index of each element: int64 of shape ``size``."""
        total = self(aten.full.default, [1] * len(size), offset, dtype=torch.int64)
        for d, (count, step) in enumerate(zip(size, stride, strict=True)):
            along = self(aten.mul.Tensor, self(aten.arange.default, count, dtype=torch.int64), step)
            total = self(aten.add.Tensor, total, self(aten.reshape.default, along, [count if i == d else 1 for i in range(len(size))]))
        return total
