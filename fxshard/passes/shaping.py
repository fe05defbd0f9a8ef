"""What the emitters of redistributions share: padding, cutting, and collectives' dense buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxshard.passes.local_graph import LocalGraph

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def pad_to(local: LocalGraph, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Zeros behind the end of each dim that is shorter than in ``shape``."""
    missing = [want - have for want, have in zip(shape, local.shape(x), strict=True)]
    if not any(missing):
        return x
    return local.emit(aten.constant_pad_nd.default, x, [n for m in reversed(missing) for n in (0, m)], 0)


def cut_to(local: LocalGraph, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    """The leading part of ``x`` of the given shape."""
    for dim, (want, have) in enumerate(zip(shape, local.shape(x), strict=True)):
        if want != have:
            x = local.emit(aten.slice.Tensor, x, dim, 0, want)
    return x


def piece(local: LocalGraph, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    if start == 0 and length == local.shape(x)[dim]:
        return x
    return local.emit(aten.slice.Tensor, x, dim, start, start + length)


def wait(local: LocalGraph, collective: fx.Node) -> fx.Node:
    return local.emit(c10d.wait_tensor.default, collective)


def contiguous(local: LocalGraph, x: fx.Node) -> fx.Node:
    """Collectives take dense buffers; a tensor that is one already passes."""
    if x.meta["val"].is_contiguous():
        return x
    return local.emit(aten.clone.default, x, memory_format=torch.contiguous_format)
