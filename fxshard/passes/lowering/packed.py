"""Redistribution steps from and to packed dims (``layout.PackedShard``): each part of the dim is cut over the ranks of the axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.layout.layouts import chunk, packed_chunks
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.passes.lowering.shaping import cut_to, pad_to, piece

aten = torch.ops.aten


def packed_chunk(local: LocalGraph, x: fx.Node, placement: PackedShard, axis: int) -> fx.Node:
    """This rank's chunk of each part of ``x``, which has the dim whole; starts are run-time values."""
    n, index, found = local.mesh.shape[axis], local.coordinate[axis], []
    for start, part in zip(itertools.accumulate(placement.parts, initial=0), placement.parts, strict=False):
        places = local.emit(aten.arange.start, start, start + chunk(part, n, index)[1], dtype=torch.int64)
        found.append(local.emit(aten.add.Tensor, places, local.start(part, axis)))
    return local.emit(aten.index_select.default, x, placement.dim, local.emit(aten.cat.default, found, 0))


def packed_for_ranks(local: LocalGraph, x: fx.Node, placement: PackedShard, block: Sequence[int], n: int) -> fx.Node:
    """The chunks for each of n ranks, padded to ``block`` and stacked on dim 0, from ``x``, which has the dim whole."""
    dim = placement.dim
    blocks = []
    for rank in range(n):
        chunks = [piece(local, x, dim, start, length) for start, length in packed_chunks(placement.parts, n, rank)]
        blocks.append(pad_to(local, local.emit(aten.cat.default, chunks, dim), block))
    return local.emit(aten.cat.default, blocks, 0)


def unpacked(local: LocalGraph, gathered: fx.Node, placement: PackedShard, block: Sequence[int], n: int, shape: Sequence[int]) -> fx.Node:
    """The whole dim, in a tensor of ``shape``, from the shards of n ranks, each padded to ``block``, stacked on dim 0."""
    dim, chunks = placement.dim, [packed_chunks(placement.parts, n, rank) for rank in range(n)]
    blocks = [piece(local, gathered, 0, rank * block[0], block[0]) for rank in range(n)]
    blocks = [cut_to(local, one, (*shape[:dim], block[dim], *shape[dim + 1 :])) for one in blocks]
    starts = [[0, *itertools.accumulate(length for _, length in of_rank)] for of_rank in chunks]
    pieces = [
        piece(local, blocks[rank], dim, starts[rank][part], chunks[rank][part][1])
        for part, rank in itertools.product(range(len(placement.parts)), range(n))
        if chunks[rank][part][1]
    ]
    return local.emit(aten.cat.default, pieces, dim)
