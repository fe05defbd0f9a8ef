"""Emits the redistribution steps from or to folded layouts (``layout.FoldedShard``), and gives their memory.

A dim that several axes cut is viewed as a grid of pieces: one grid dim for each axis of which this rank holds all pieces, in the order of
nesting, and one dim for the elements of a piece, padded to the ceil size. One grid dim belongs to the step's axis: it moves to the front
before the collective, and back to its place after it. When the dim becomes plain again, each piece is cut to its own length. With even
shards there is no padding or cutting, only views and at most two copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from fxshard._torch_compat.sizes.symbols import is_symbolic, surely
from fxshard.layout.layouts import Layout, ceil_shape, chunk, folded_piece_size, local_shape, sharded_dim
from fxshard.layout.steps import Step, exchange_shape
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.passes.lowering.shaping import MANY, contiguous, cut_to, pad_to, piece, wait

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Lengths = Sequence[tuple[int, int]]
"""(offset, length) of the pieces of a plain dim."""


@dataclass(frozen=True)
class Nested:
    """A plain dim of ``length`` that is cut in turn by axes of ``parts`` ranks, into pieces padded to ``piece``."""

    length: Any
    parts: tuple[int, ...]
    piece: Any

    @property
    def is_full(self) -> bool:
        """Whether every piece has its full length without padding."""
        return surely(math.prod(self.parts) * self.piece == self.length)

    @property
    def at_once(self) -> bool:
        """Whether all pieces are selected together by the indexes of their elements (as in ``shaping.at_once``)."""
        return is_symbolic(self.length) or math.prod(self.parts) > MANY

    @property
    def pieces(self) -> Lengths:
        found = [(0, self.length)]
        for n in self.parts:
            found = [(start + offset, length) for start, size in found for offset, length in (chunk(size, n, i) for i in range(n))]
        return found


@dataclass(frozen=True)
class Grid:
    """The pieces of a dim that a step leaves or enters: ``before`` x ``n`` (ranks of the step's axis) x ``behind``, each of ``piece``
    elements."""

    dim: int
    before: int
    n: int
    behind: int
    piece: int

    def split_shape(self, shape: Sequence[int]) -> list[int]:
        """``shape`` with the dim split into (before, n, the rest)."""
        return [*shape[: self.dim], self.before, self.n, self.behind * self.piece, *shape[self.dim + 1 :]]

    @property
    def length(self) -> int:
        return self.before * self.n * self.behind * self.piece

    def is_scattered(self, shape: Sequence[int]) -> bool:
        """Whether the pieces of one rank are not adjacent in a tensor of ``shape``."""
        return self.n > 1 and self.before * math.prod(shape[: self.dim]) > 1


@dataclass(frozen=True)
class FoldedStep:
    """One step from ``layout`` of a tensor with global ``shape``, folded before or after it, on the rank at ``coordinate``."""

    step: Step
    layout: Layout
    shape: tuple[int, ...]
    mesh: Mesh
    coordinate: tuple[int, ...]

    @cached_property
    def after(self) -> Layout:
        return self.step.after(self.layout)

    @cached_property
    def left(self) -> Grid | None:
        """The dim that the step gathers pieces of."""
        return self._grid(self.layout, sharded_dim(self.step.source))

    @cached_property
    def entered(self) -> Grid | None:
        """The dim that the step splits into pieces."""
        return self._grid(self.after, sharded_dim(self.step.target))

    def _nest(self, dim: int) -> tuple[int, ...]:
        return self.layout.nest_on(dim) or self.after.nest_on(dim) or max(self.layout.held_on(dim), self.after.held_on(dim), key=len)

    def _grid(self, held: Layout, dim: int | None) -> Grid | None:
        """``held``: the layout in which the step's axis shards the dim."""
        if dim is None:
            return None
        nest, axis, sizes = self._nest(dim), self.step.axis, self.mesh.shape
        loose = [a for a in nest if a not in held.held_on(dim)]
        before, behind = (math.prod(sizes[a] for a in loose if (a < axis) == first) for first in (True, False))
        return Grid(dim, before, sizes[axis], behind, folded_piece_size(self.shape[dim], nest, sizes))

    @cached_property
    def taken_apart(self) -> Nested | None:
        """The pieces of the entered dim if it is plain before the step; None if they are already padded."""
        return self._nested(self.layout, self.entered)

    @cached_property
    def put_together(self) -> Nested | None:
        """The pieces of the left dim if it is plain after the step; None if they stay padded."""
        return self._nested(self.after, self.left)

    def _nested(self, plain: Layout, grid: Grid | None) -> Nested | None:
        if grid is None or plain.nest_on(grid.dim):
            return None
        length = local_shape(self.shape, plain, self.mesh.shape, self.coordinate)[grid.dim]
        parts = tuple(self.mesh.shape[axis] for axis in self._nest(grid.dim)[len(plain.held_on(grid.dim)) :])
        found = Nested(length, parts, grid.piece)
        return None if found.is_full else found

    @property
    def at_once(self) -> bool:
        """Whether there are so many pieces that their elements are selected by index."""
        return any(nested is not None and nested.at_once for nested in (self.taken_apart, self.put_together))

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Shape of the rank's input, padded."""
        shape = ceil_shape(self.shape, self.layout, self.mesh.shape)
        return shape if self.entered is None else tuple(self.entered.length if d == self.entered.dim else s for d, s in enumerate(shape))

    @cached_property
    def block(self) -> tuple[int, ...]:
        """Shape of the block that is exchanged with one rank of the axis."""
        return self.whole if self.entered is None else exchange_shape(self.step, self.layout, self.shape, self.mesh)

    def stages(self, itemsize: int, dense: bool) -> list[tuple[int, bool]]:
        """(bytes besides the input, whether the input is still needed), one after another, on rank zero, whose dims have ceil sizes."""
        whole, block = math.prod(self.whole) * itemsize, math.prod(self.block) * itemsize
        made = {"all_gather": block * self.entered_or_left.n, "all_to_all": whole}.get(self.step.kind, block)
        found: list[tuple[int, bool]] = []
        held = 0

        def take(size: int, meanwhile: int = 0) -> None:
            nonlocal held
            found.append((held + size + meanwhile, not held))
            held = size

        if self.entered and self.taken_apart:
            short = sum(length < self.entered.piece for _, length in self.taken_apart.pieces)
            take(whole, short * self.entered.piece * whole // max(self.entered.length, 1))
        sends = self.step.kind != "slice"
        if sends and ((self.entered and self.entered.is_scattered(self.whole)) or not (held or dense)):
            take(whole)
        take(made)
        if self.left and self.left.is_scattered(self.block):
            take(made)
        result = math.prod(ceil_shape(self.shape, self.after, self.mesh.shape)) * itemsize
        if self.put_together:
            take(result)
        if isinstance(self.step.source, Partial) and self.step.source.reduce_op == "avg":
            take(result)
        return found

    @property
    def entered_or_left(self) -> Grid:
        found = self.entered or self.left
        assert found is not None, "a folded step leaves a dim or enters one"
        return found


def emit_folded_step(local: LocalGraph, x: fx.Node, folded: FoldedStep) -> tuple[fx.Node, fx.Node | None]:
    """Applies the step to the local tensor ``x``; returns (result, collective node)."""
    p, step = folded, folded.step
    if p.entered and p.taken_apart:
        x = _taken_apart(local, x, p.entered.dim, p.taken_apart)
    x = pad_to(local, x, p.whole)
    if step.kind == "slice":
        return _cut(local, _own(local, x, p), p), None
    sent = contiguous(local, _to_front(local, x, p.entered) if p.entered else x)
    arrived, collective = _exchange(local, sent, p)
    result = _to_place(local, arrived, p.left, p.block) if p.left else arrived
    if p.left and p.put_together:
        result = _put_together(local, result, p.left.dim, p.put_together)
    result = _cut(local, result, p)
    if isinstance(step.source, Partial) and step.source.reduce_op == "avg":  # a mean is computed as a sum
        result = local.emit(aten.div.Tensor, result, p.entered_or_left.n)
    return result, collective


def _taken_apart(local: LocalGraph, x: fx.Node, dim: int, nested: Nested) -> fx.Node:
    """The pieces of a plain dim, concatenated, each padded with zeros."""
    if nested.at_once:
        shape = local.shape(x)
        with_zero = pad_to(local, x, (*shape[:dim], nested.length + 1, *shape[dim + 1 :]))
        return local.emit(aten.index_select.default, with_zero, dim, _piece_indexes(local, nested))
    block = (*local.shape(x)[:dim], nested.piece, *local.shape(x)[dim + 1 :])
    return local.emit(aten.cat.default, [pad_to(local, piece(local, x, dim, *one), block) for one in nested.pieces], dim)


def _put_together(local: LocalGraph, x: fx.Node, dim: int, nested: Nested) -> fx.Node:
    """The inverse: a plain dim from its padded pieces."""
    if nested.at_once:
        return local.emit(aten.index_select.default, x, dim, _plain_indexes(local, nested))
    ends = [(k * nested.piece, length) for k, (_, length) in enumerate(nested.pieces)]
    return local.emit(aten.cat.default, [piece(local, x, dim, *one) for one in ends], dim)


def _piece_indexes(local: LocalGraph, nested: Nested) -> fx.Node:
    """For each element of the padded pieces, in order, its index in the plain dim; for padding ``length``, one past the end.

    Axis by axis: a piece begins ``min(index * step, size)`` after the start of the enclosing one, and has ``min(step, the rest)`` elements.
    """
    ndim = len(nested.parts) + 1
    begin, size = None, nested.length
    for level, n in enumerate(nested.parts):
        index = _arange_along(local, n, level, ndim)
        step = -(-size // n) if not isinstance(size, fx.Node) else _ceil(local, size, n)
        offset = _minimum(local, local.emit(aten.mul.Tensor, index, step), size)
        begin = offset if begin is None else local.emit(aten.add.Tensor, begin, offset)
        rest = local.emit(aten.sub.Tensor, size, offset) if isinstance(size, fx.Node) else local.emit(aten.rsub.Scalar, offset, size)
        size = _minimum(local, rest, step)
    inner = _arange_along(local, nested.piece, ndim - 1, ndim)
    behind = local.emit(aten.ge.Tensor, inner, size)
    places = local.emit(aten.masked_fill.Scalar, local.emit(aten.add.Tensor, inner, begin), behind, nested.length)
    return local.emit(aten.view.default, places, [math.prod(nested.parts) * nested.piece])


def _plain_indexes(local: LocalGraph, nested: Nested) -> fx.Node:
    """For each element of the plain dim, its index in the padded pieces."""
    rest: Any = local.emit(aten.arange.default, nested.length, dtype=torch.int64)
    number, size = None, nested.length
    for n in nested.parts:
        step = -(-size // n) if not isinstance(size, fx.Node) else _ceil(local, size, n)
        index = local.emit(DIVIDE[isinstance(step, fx.Node)], rest, step, rounding_mode="floor")
        begin = local.emit(aten.mul.Tensor, index, step)
        rest = local.emit(aten.sub.Tensor, rest, begin)
        left = local.emit(aten.sub.Tensor, size, begin) if isinstance(size, fx.Node) else local.emit(aten.rsub.Scalar, begin, size)
        size = _minimum(local, left, step)
        number = index if number is None else local.emit(aten.add.Tensor, local.emit(aten.mul.Tensor, number, n), index)
    return local.emit(aten.add.Tensor, local.emit(aten.mul.Tensor, number, nested.piece), rest)


DIVIDE = (aten.div.Scalar_mode, aten.div.Tensor_mode)


def _ceil(local: LocalGraph, size: fx.Node, n: int) -> fx.Node:
    return local.emit(aten.div.Scalar_mode, local.emit(aten.add.Tensor, size, n - 1), n, rounding_mode="floor")


def _minimum(local: LocalGraph, x: fx.Node, other: Any) -> fx.Node:
    return local.emit(aten.minimum.default, x, other) if isinstance(other, fx.Node) else local.emit(aten.clamp_max.default, x, other)


def _arange_along(local: LocalGraph, n: Any, dim: int, ndim: int) -> fx.Node:
    """0 to n - 1 along one of ``ndim`` dims."""
    shape = [1] * ndim
    shape[dim] = n
    return local.emit(aten.view.default, local.emit(aten.arange.default, n, dtype=torch.int64), shape)


def _exchange(local: LocalGraph, sent: fx.Node, p: FoldedStep) -> tuple[fx.Node, fx.Node]:
    """(received tensor, collective node). Except after a reduction, the blocks of the axis's ranks are stacked on dim 0."""
    n, group = p.entered_or_left.n, p.mesh.axis_names[p.step.axis]
    if p.step.kind == "all_gather":
        collective = local.emit(c10d.all_gather_into_tensor.default, sent, n, group)
        return local.emit(aten.view.default, wait(local, collective), [n, *p.block]), collective
    if p.step.kind == "all_to_all":
        collective = local.emit(c10d.all_to_all_single.default, sent, [1] * n, [1] * n, group)
        return wait(local, collective), collective
    assert isinstance(p.step.source, Partial)
    op = p.step.source.reduce_op
    stacked = local.emit(aten.view.default, sent, [n * p.block[0], *p.block[1:]])
    collective = local.emit(c10d.reduce_scatter_tensor.default, stacked, "sum" if op == "avg" else op, n, group)
    return wait(local, collective), collective


def _to_front(local: LocalGraph, x: fx.Node, grid: Grid) -> fx.Node:
    """(n, *block) from a tensor with a grid of pieces in a dim."""
    apart = local.emit(aten.view.default, x, grid.split_shape(local.shape(x)))
    place = grid.dim + 1
    moved = local.emit(aten.permute.default, apart, [place, *(d for d in range(len(local.shape(apart))) if d != place)])
    shape = local.shape(x)
    return local.emit(
        aten.view.default,
        contiguous(local, moved),
        [grid.n, *shape[: grid.dim], grid.before * grid.behind * grid.piece, *shape[grid.dim + 1 :]],
    )


def _to_place(local: LocalGraph, arrived: fx.Node, grid: Grid, block: Sequence[int]) -> fx.Node:
    """The inverse: from (n, *block), a tensor with a grid of pieces in a dim."""
    spread = grid.split_shape(block)
    place = grid.dim + 1
    apart = local.emit(aten.view.default, arrived, [grid.n, *spread[:place], *spread[place + 1 :]])
    order = [*range(1, place + 1), 0, *range(place + 1, len(spread))]
    moved = contiguous(local, local.emit(aten.permute.default, apart, order))
    return local.emit(aten.view.default, moved, [*block[: grid.dim], grid.length, *block[grid.dim + 1 :]])


def _own(local: LocalGraph, x: fx.Node, p: FoldedStep) -> fx.Node:
    """The rank's own pieces of a tensor that it holds in full."""
    assert p.entered is not None
    apart = local.emit(aten.view.default, x, p.entered.split_shape(local.shape(x)))
    own = local.emit(aten.index_select.default, apart, p.entered.dim + 1, local.axis_index(p.step.axis))
    return local.emit(aten.view.default, own, list(p.block))


def _cut(local: LocalGraph, x: fx.Node, p: FoldedStep) -> fx.Node:
    return cut_to(local, x, local.local_shape(p.shape, p.after))
