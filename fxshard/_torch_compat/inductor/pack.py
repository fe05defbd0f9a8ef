"""``fxshard::pack``: concatenate flattened tensors in one buffer, into which Inductor computes them directly.

Inductor computes the operands of ``aten.cat`` in place in the result, but copies results of external kernels (matrix products) that are
read through a view. The flattened gradients of a bucket are such views. ``pack`` flattens its operands itself, so that its lowering sees
the product and not the view. Decision 0034.

What would replace it: a registration of lowerings for custom operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch_compat.imports.sources import quick_sources

aten = torch.ops.aten
FLATTENS = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
"""Operators that keep the order of elements, if their result is contiguous."""
LOWERING = 1
"""Version of ``_lower``. As an argument in the graph it is part of the key of Inductor's disk cache."""


with quick_sources():

    @torch.library.custom_op("fxshard::pack", mutates_args=())
    def pack(parts: Sequence[Tensor], lowering: int = LOWERING) -> Tensor:
        """The elements of all ``parts``, each flattened: [sum of their numbers of elements]."""
        return torch.cat([part.reshape(-1) for part in parts])

    @pack.register_fake
    def _(parts: Sequence[Tensor], lowering: int = LOWERING) -> Tensor:
        return parts[0].new_empty([sum(math.prod(part.shape) for part in parts)])


def pack_in_place(graph: fx.Graph) -> None:
    """Replace each ``aten.cat`` of one-dimensional tensors with equal dtype and known sizes by ``pack``; changes ``graph``."""
    cats = [n for n in graph.find_nodes(op="call_function", target=aten.cat.default) if n.args and _is_flat(n.args[0])]
    for node in cats:
        with graph.inserting_before(node):
            packed = graph.call_function(torch.ops.fxshard.pack.default, (list(map(_unflattened, node.args[0])), LOWERING))
        packed.meta = dict(node.meta)
        node.replace_all_uses_with(packed)
        graph.erase_node(node)
    if cats:
        graph.eliminate_dead_code()


def _is_flat(parts: Sequence[fx.Node]) -> bool:
    values = [part.meta["val"] for part in parts]
    return len({v.dtype for v in values}) == 1 and all(v.dim() == 1 and isinstance(v.shape[0], int) for v in values)


def _unflattened(part: fx.Node) -> fx.Node:
    """The value that ``part`` flattens, traced back through flattening operators that have one user."""
    while part.target in FLATTENS and len(part.users) == 1:
        part = part.all_input_nodes[0]
    return part


def register() -> None:
    """Register the lowering of ``pack`` with Inductor, once."""
    from torch._inductor.lowering import lowerings, register_lowering

    op = torch.ops.fxshard.pack.default
    if op not in lowerings:
        register_lowering(op, type_promotion_kind=None)(_lower)


def _lower(parts: Sequence[Any], lowering: int = LOWERING) -> Any:
    """As ``ConcatKernel.create``, for operands of any shape."""
    from torch._inductor import ir
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    device, dtype = parts[0].get_device(), parts[0].get_dtype()
    sizes = [part.get_size() for part in parts]

    def layout(size: Sequence[Any], offset: Any) -> Any:
        return ir.FixedLayout(device, dtype, size, ir.FlexibleLayout.contiguous_strides(size), offset)

    *starts, total = itertools.accumulate(map(math.prod, sizes), initial=0)
    whole = ir.ConcatKernel(name=None, layout=layout([total], 0), inputs=[])
    box = ir.StorageBox(whole)
    seen = _seen_by_others()
    unseen = [clone(part) if _storage(part) in seen else part for part in parts]
    places = (ir.ReinterpretView(data=box, layout=layout(size, start)) for size, start in zip(sizes, starts, strict=True))
    inputs = [ir.ConcatKernel.realize_into(part, place) for part, place in zip(unseen, places, strict=True)]
    whole.name = V.graph.register_buffer(whole)
    whole.inputs = ir.ConcatKernel.unwrap_storage(inputs)
    V.graph.register_operation(whole)
    return ir.TensorBox(box)


def _seen_by_others() -> set[int]:
    """The storages with users other than the node being lowered.

    They must be copied, since a later write into the packed buffer (an in-place collective) would change them.
    """
    from torch._inductor.virtualized import V

    found: set[int] = set()
    for node, value in V.graph.env.items():
        boxes = value if isinstance(value, (list, tuple)) else [value]
        storages = set(filter(None, map(_storage, boxes)))
        for user in node.users:
            if user is not V.graph.current_node:
                made = _storage(V.graph.env.get(user))
                found |= storages - {made}  # views of the same storage are checked by their own users
    return found


def _storage(value: Any) -> int | None:
    """An identifier of the storage of an Inductor value or view; None for other values."""
    from torch._inductor import ir

    while isinstance(value, (ir.TensorBox, ir.BaseView)):
        value = value.data
    return id(value) if isinstance(value, ir.StorageBox) else None
