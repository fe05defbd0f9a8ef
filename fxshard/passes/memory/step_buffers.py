"""Workspace of the steps of a redistribution on the largest rank, buffer by buffer as ``emit`` creates them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Shard

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.layout.layouts import Layout, ceil_shape, chunk_lengths, packed_chunks
from fxshard.layout.redistribution import Step
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.folded import FoldedStep
from fxshard.passes.lowering.shaping import adjoin

NUMBER = torch.int64.itemsize
"""Bytes of an index into a tensor."""

NEUTRAL = ("sum", "product")
"""Pending reductions for which all ranks but the first hold the neutral element."""

Stage = tuple[int, bool]
"""(bytes besides the step's input, whether the input is still needed)."""


@dataclass(frozen=True)
class Buffers:
    """Sizes of one step. ``x``: bytes of the input, ``dense`` if it has no gaps; ``y``: bytes of the result; ``n``: ranks; ``length``: of
    the dim that is cut, per rank; ``short``: ranks with a shorter piece; ``block``: bytes sent to one rank; ``straight``: nothing has to be
    stacked, concatenated or cut; ``placed``: what an all-to-all receives need not be concatenated."""

    step: Step
    x: int
    y: int
    n: int
    itemsize: int
    straight: bool
    dense: bool
    length: int = 0
    short: int = 0
    block: int = 0
    placed: bool = False

    def stages(self) -> Sequence[Stage]:
        return getattr(self, f"_{self.step.kind}")()

    def _sent(self, buffer: int) -> list[Stage]:
        """A collective on the input, which is copied first if it has gaps."""
        return [(buffer, True)] if self.dense else [(self.x, True), (self.x + buffer, False)]

    def _mean(self) -> list[Stage]:
        """The division after the sum, for a mean."""
        assert isinstance(self.step.source, Partial)
        return [(2 * self.y, False)] if self.step.source.reduce_op == "avg" else []

    def _all_reduce(self) -> list[Stage]:
        return [*self._sent(self.y), *self._mean()]

    def _all_gather(self) -> list[Stage]:
        stacked = self.n * self.x
        return self._sent(stacked) if self.straight else [*self._sent(stacked), (stacked + self.y, False)]

    def _reduce_scatter(self) -> list[Stage]:
        stacked = self.n * self.y
        pieces = [(self.short * self.y + stacked, True), (stacked + self.y, False)]
        return [*(self._sent(self.y) if self.straight else pieces), *self._mean()]

    def _all_to_all(self) -> list[Stage]:
        stacked = self.n * self.block
        sent = self._sent(stacked) if self.straight else [(self.short * self.block + stacked, True), (2 * stacked, False)]
        return sent if self.placed else [*sent, (stacked + self.y, False)]

    def _slice(self) -> list[Stage]:
        places = NUMBER * self.length
        return [(0, True)] if self.straight else [(2 * places + NUMBER, True), (places + self.y, True)]

    def _to_partial(self) -> list[Stage]:
        """The workspace is the test for the first rank and the neutral element."""
        return [(0, True)] if self.straight else [(1 + self.itemsize + self.y, True)]


def makes_anew(step: Step, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether, on the largest rank, the result of a step from ``layout`` is a new tensor and not its input."""
    if isinstance(step.target, Partial):
        return step.target.reduce_op in NEUTRAL
    return step.is_collective or ceil_shape(shape, layout, mesh.shape) != ceil_shape(shape, step.after(layout), mesh.shape)


def stages(step: Step, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, dense: bool, mesh: Mesh) -> Sequence[Stage]:
    """The stages of one step from ``layout``, for the largest shard of a tensor of ``shape``."""
    itemsize, after = dtype.itemsize, step.after(layout)
    if dtype != torch.bool or not step.is_collective:
        return _stages(step, layout, after, shape, itemsize, dense, mesh)
    x, y = (math.prod(ceil_shape(shape, at, mesh.shape)) * itemsize for at in (layout, after))
    inner = _stages(step, layout, after, shape, itemsize, True, mesh)  # bools travel as bytes
    return [(x, True), *((taken + (x if reads else 0), False) for taken, reads in inner), (2 * y, False)]


def _stages(step: Step, layout: Layout, to: Layout, shape: tuple[int, ...], itemsize: int, dense: bool, mesh: Mesh) -> Sequence[Stage]:
    if layout.is_folded or to.is_folded:
        return FoldedStep(step, layout, shape, mesh, (0,) * mesh.ndim).stages(itemsize, dense)
    before, after = (ceil_shape(shape, at, mesh.shape) for at in (layout, to))
    x, y = math.prod(before) * itemsize, math.prod(after) * itemsize
    return _buffers(step, before, after, x, y, mesh.shape[step.axis], itemsize, dense).stages()


def _buffers(step: Step, before: tuple[int, ...], after: tuple[int, ...], x: int, y: int, n: int, itemsize: int, dense: bool) -> Buffers:
    straight, length, short = False, 0, 0
    if isinstance(step.target, PackedShard):
        dim = step.target.dim
        length = after[dim]
        short = sum(sum(size for _, size in packed_chunks(step.target.parts, n, rank)) < length for rank in range(n))
        short = n if step.kind == "reduce_scatter" else short  # the chunks of a rank are joined first
    if isinstance(step.target, Shard):
        dim = step.target.dim
        length = after[dim]
        short = sum(one < length for one in chunk_lengths(before[dim], n))
        straight = length == before[dim] if step.kind == "slice" else adjoin(before, dim) and not short
    gathered = isinstance(step.source, Shard) and adjoin(after, step.source.dim) and n * before[step.source.dim] == after[step.source.dim]
    if step.kind == "all_gather":
        straight = gathered
    elif step.kind == "to_partial":
        assert isinstance(step.target, Partial)
        straight = step.target.reduce_op not in NEUTRAL
    block = math.prod(map(min, before, after)) * itemsize
    return Buffers(step, x, y, n, itemsize, straight, dense, length, short, block, gathered)
