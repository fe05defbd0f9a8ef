"""Helpers for emitting redistributions: padding, cutting, and dense buffers for collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import is_symbolic, surely
from fxshard.layout.layouts import chunk, chunk_lengths
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.strategies.engine.local import emit_padding

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def pad_to(local: LocalGraph, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    """Appends zeros to each dim that is shorter than in ``shape``."""
    missing = [want - have for want, have in zip(shape, local.shape(x), strict=True)]
    if all(surely(m == 0) for m in missing):
        return x
    return padded(local, x, [n for m in reversed(missing) for n in (0, m)], 0)


def padded(local: LocalGraph, x: fx.Node, amounts: Sequence[int], value: float) -> fx.Node:
    """``constant_pad_nd``; of a dense copy if all amounts may be 0: then torch's kernel keeps the strides of ``x``, while the value in the
    graph is dense at all sizes."""
    if not any(surely(amount > 0) for amount in amounts):
        x = contiguous(local, x)
    return emit_padding(local.emit, x, amounts, value)


def cut_to(local: LocalGraph, x: fx.Node, shape: Sequence[int]) -> fx.Node:
    """The leading part of ``x`` with the given shape."""
    for dim, (want, have) in enumerate(zip(shape, local.shape(x), strict=True)):
        if not surely(want == have):
            x = _part(local, x, dim, 0, want)
    return x


def piece(local: LocalGraph, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    if surely(start == 0) and surely(length == local.shape(x)[dim]):
        return x
    return _part(local, x, dim, start, length)


def surely_within(start: int, length: int, size: int) -> bool:
    """Whether a slice of ``length`` from ``start`` provably lies within a dim of ``size``, at all sizes; adds no guard."""
    return surely(start >= 0) and surely(start + length >= 0) and surely(start + length <= size)


def _part(local: LocalGraph, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    """A slice. Unless its ends provably lie within the dim at all sizes, an index_select instead: torch would add guards for a slice."""
    if surely_within(start, length, local.shape(x)[dim]):
        return local.emit(aten.slice.Tensor, x, dim, start, start + length)
    places = local.emit(aten.arange.default, length, dtype=torch.int64)
    if not surely(start == 0):
        places = local.emit(aten.add.Tensor, places, start)
    return local.emit(aten.index_select.default, x, dim, places)


MANY = 16
"""With more chunks than this, they are handled all at once by views and padding."""


def at_once(size: Any, n: int) -> bool:
    """Whether all ``n`` chunks of a dim are handled at once: if there are many, or if their lengths depend on a symbol. Otherwise each
    chunk is a slice, which copies only its own elements."""
    return n > MANY or (is_symbolic(size) and not surely(-(-size // n) * n == size))


def stacked(local: LocalGraph, x: fx.Node, dim: int, n: int, block: Sequence[int]) -> fx.Node:
    """(n, *block): the chunks of ``dim``, each padded with zeros. The number of calls does not grow with n."""
    shape = local.shape(x)
    length = chunk(shape[dim], n, 0)[1]
    x = pad_to(local, x, (*block[:dim], n * length, *block[dim + 1 :]))
    x = local.emit(aten.view.default, x, [*block[:dim], n, length, *block[dim + 1 :]])
    x = pad_to(local, x, (*block[:dim], n, *block[dim:]))
    if dim:
        x = local.emit(aten.permute.default, x, [dim, *range(dim), *range(dim + 1, len(block) + 1)])
    return x


def side_by_side(local: LocalGraph, blocks: fx.Node, shape: Sequence[int], dim: int) -> fx.Node:
    """The inverse: from (n, *block), a tensor of ``shape`` that concatenates the valid parts of the blocks along ``dim``."""
    n, *block = local.shape(blocks)
    length = chunk(shape[dim], n, 0)[1]
    x = cut_to(local, blocks, (n, *block[:dim], length, *block[dim + 1 :]))
    if dim:
        x = local.emit(aten.permute.default, x, [*range(1, dim + 1), 0, *range(dim + 1, len(block) + 1)])
    x = local.emit(aten.view.default, contiguous(local, x), [*block[:dim], n * length, *block[dim + 1 :]])
    return cut_to(local, x, shape)


def joined(local: LocalGraph, blocks: Sequence[fx.Node], shape: Sequence[int], dim: int) -> fx.Node:
    """Concatenates blocks of ceil size along ``dim``, each cut to its own part of ``shape``.

    If lengths depend on the rank, and no block is longer than the first part, the concatenation is cut once at its end instead: the parts
    then have no gaps, and none after a shorter one has elements. (If an earlier axis has cut the dim, a rank with a short piece has parts
    shorter than the blocks.)
    """
    lengths: tuple[Any, ...] = chunk_lengths(shape[dim], len(blocks))
    sizes = [local.shape(b)[dim] for b in blocks]
    certain = all(isinstance(n, int) or surely(n == size) for n, size in zip(lengths, sizes, strict=True))
    if not certain and surely(lengths[0] == sizes[0]):
        lengths = tuple(sizes)
    parts = [cut_to(local, b, (*shape[:dim], n, *shape[dim + 1 :])) for b, n in zip(blocks, lengths, strict=True)]
    whole = local.emit(aten.cat.default, parts, dim)
    return whole if certain else cut_to(local, whole, shape)


def alike(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal; symbolic ones must be equal at all sizes."""
    return len(shape) == len(other) and all(surely(a == b) for a, b in zip(shape, other, strict=True))


def adjoin(shape: Sequence[int], dim: int) -> bool:
    """Whether the pieces that ``dim`` is cut into lie one after the other in a dense tensor of ``shape``; symbolic ones at all sizes."""
    return all(surely(size == 1) for size in shape[:dim])


def joint(block: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    """The shape of n blocks, one behind the other along ``dim``."""
    return (*block[:dim], n * block[dim], *block[dim + 1 :])


def wait(local: LocalGraph, collective: fx.Node) -> fx.Node:
    return local.emit(c10d.wait_tensor.default, collective)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, at all sizes if it has symbols; torch's own test would ask whether a symbol is 1."""
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
    """A dense copy for a collective; ``x`` itself if it is dense."""
    if is_dense(x.meta["val"]):
        return x
    return local.emit(aten.clone.default, x, memory_format=torch.contiguous_format)
