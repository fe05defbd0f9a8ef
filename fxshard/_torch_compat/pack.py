"""``fxshard::pack``: tensors one behind another in one buffer, into which Inductor has them computed.

What ``aten.cat`` joins Inductor computes where it is to lie, except results of kernels that are not its own (matrix products) and are
seen through a view, which it copies. The buffer of a bucket of gradients is made of such: each is flattened. ``pack`` flattens by itself,
so that its lowering finds the product and not the view.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
FLATTENS = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
"""What leaves the order of elements, in a result that is contiguous."""


@torch.library.custom_op("fxshard::pack", mutates_args=())
def pack(parts: Sequence[Tensor]) -> Tensor:
    """All elements of ``parts``, each in the order of its dims: [sum of their numbers of elements]."""
    return torch.cat([part.reshape(-1) for part in parts])


@pack.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].new_empty([sum(math.prod(part.shape) for part in parts)])


def pack_in_place(graph: fx.Graph) -> None:
    """Has ``pack`` in place of each ``aten.cat`` of flattened tensors of one dtype and known sizes; changes ``graph``.

    Where nobody else reads a tensor, and none of its views, it is computed in the buffer: what writes there later, a collective in
    place, changes what nobody sees.
    """
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0]
        if len({part.meta["val"].dtype for part in parts}) > 1 or not all(part.target in FLATTENS for part in parts):
            continue
        if any(part.meta["val"].dim() != 1 or not isinstance(part.meta["val"].shape[0], int) for part in parts):
            continue
        with graph.inserting_before(node):
            packed = graph.call_function(torch.ops.fxshard.pack.default, ([_unseen(part) for part in parts],))
        packed.meta = dict(node.meta)
        node.replace_all_uses_with(packed)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _unseen(part: fx.Node) -> fx.Node:
    """Of what ``part`` views the tensor itself, if all of its elements are in ``part`` alone."""
    at = part
    while at.target in FLATTENS and len(at.users) == 1:
        (at,) = at.all_input_nodes[:1]
    fresh = at.op == "call_function" and not any(one.alias_info for one in at.target._schema.returns)
    return at if fresh and len(at.users) == 1 else part


def register() -> None:
    """Tells Inductor how to lower ``pack``; once."""
    from torch._inductor.lowering import lowerings, register_lowering

    op = torch.ops.fxshard.pack.default
    if op not in lowerings:
        register_lowering(op, type_promotion_kind=None)(_lower)


def _lower(parts: Sequence[Any]) -> Any:
    """As ``ConcatKernel.create`` does it, for places of any shape."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    first = parts[0]
    sizes = [part.get_size() for part in parts]

    def layout(size: Sequence[Any], offset: Any) -> Any:
        return ir.FixedLayout(first.get_device(), first.get_dtype(), size, ir.FlexibleLayout.contiguous_strides(size), offset)

    *starts, total = itertools.accumulate(map(math.prod, sizes), initial=0)
    whole = ir.ConcatKernel(name=None, layout=layout([total], 0), inputs=[])
    box = ir.StorageBox(whole)
    places = (ir.ReinterpretView(data=box, layout=layout(size, start)) for size, start in zip(sizes, starts, strict=True))
    inputs = [ir.ConcatKernel.realize_into(part, place) for part, place in zip(parts, places, strict=True)]
    whole.name = V.graph.register_buffer(whole)
    whole.inputs = ir.ConcatKernel.unwrap_storage(inputs)
    V.graph.register_operation(whole)
    return ir.TensorBox(box)
