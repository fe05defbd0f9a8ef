"""What the emitters of redistributions share: padding, cutting, and collectives' dense buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.symbols import surely
from fxshard.layout import chunk_lengths
from fxshard.passes.local_graph import LocalGraph

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def pad_to(local: LocalGraph, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Zeros behind the end of each dim that is shorter than in ``shape``."""
    missing = [want - have for want, have in zip(shape, local.shape(x), strict=True)]
    if all(surely(m == 0) for m in missing):
        return x
    return local.emit(aten.constant_pad_nd.default, x, [n for m in reversed(missing) for n in (0, m)], 0)


def cut_to(local: LocalGraph, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    """The leading part of ``x`` of the given shape."""
    for dim, (want, have) in enumerate(zip(shape, local.shape(x), strict=True)):
        if not surely(want == have):
            x = _part(local, x, dim, 0, want)
    return x


def piece(local: LocalGraph, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    if surely(start == 0) and surely(length == local.shape(x)[dim]):
        return x
    return _part(local, x, dim, start, length)


def _part(local: LocalGraph, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    """A slice; where it is not certain for all sizes that it lies within the dim elements by their index: of a slice torch would ask."""
    if surely(start >= 0) and surely(start + length <= local.shape(x)[dim]):
        return local.emit(aten.slice.Tensor, x, dim, start, start + length)
    places = local.emit(aten.arange.default, length, dtype=torch.int64)
    if not surely(start == 0):
        places = local.emit(aten.add.Tensor, places, start)
    return local.emit(aten.index_select.default, x, dim, places)


def joined(local: LocalGraph, blocks: Sequence[fx.Node], shape: Sequence[int], dim: int) -> fx.Node:
    """Blocks of ceil size side by side along ``dim``, each cut to its own part of ``shape``.

    Where lengths depend on the rank's place, and blocks are no longer than the first part, all is cut at once behind the last one: parts
    stand without gaps then, and none behind a shorter one has elements. (Where an axis before this one has cut the dim, a rank whose
    piece is short has shorter parts than blocks.)
    """
    lengths = chunk_lengths(shape[dim], len(blocks))
    sizes = [local.shape(b)[dim] for b in blocks]
    certain = all(isinstance(n, int) or surely(n == size) for n, size in zip(lengths, sizes, strict=True))
    if not certain and surely(lengths[0] == sizes[0]):
        lengths = tuple(sizes)
    parts = [cut_to(local, b, (*shape[:dim], n, *shape[dim + 1 :])) for b, n in zip(blocks, lengths, strict=True)]
    whole = local.emit(aten.cat.default, parts, dim)
    return whole if certain else cut_to(local, whole, shape)


def alike(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are the same, for all sizes where they hold symbols."""
    return len(shape) == len(other) and all(surely(a == b) for a, b in zip(shape, other, strict=True))


def wait(local: LocalGraph, collective: fx.Node) -> fx.Node:
    return local.emit(c10d.wait_tensor.default, collective)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, for all sizes where it has symbols; torch would ask whether one of them is 1."""
    if all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return value.is_contiguous()
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if surely(size == 1):
            continue
        if not surely(stride == expected):
            return False
        expected = expected * size
    return True


def contiguous(local: LocalGraph, x: fx.Node) -> fx.Node:
    """Collectives take dense buffers; a tensor that is one already passes."""
    if is_dense(x.meta["val"]):
        return x
    return local.emit(aten.clone.default, x, memory_format=torch.contiguous_format)
