"""A second implementation of sharding, with torch.chunk only: tests compare layouts, steps and simulated ranks with it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import Partial, Shard

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.layout.layouts import Layout

Coordinate = tuple[int, ...]
REDUCE = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}


def coordinates(mesh_shape: Sequence[int]) -> list[Coordinate]:
    return list(itertools.product(*map(range, mesh_shape)))


def shard(whole: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], coordinate: Coordinate) -> torch.Tensor:
    """The shard at ``coordinate``: its chunk axis by axis, of each part of a packed dim."""
    for placement, ranks, index in zip(layout, mesh_shape, coordinate, strict=True):
        if isinstance(placement, PackedShard):
            parts = whole.split(placement.parts, placement.dim)
            whole = torch.cat([_chunk(part, ranks, index, placement.dim) for part in parts], placement.dim)
        elif isinstance(placement, Shard):
            whole = _chunk(whole, ranks, index, placement.dim)
    return whole


def _chunk(whole: torch.Tensor, ranks: int, index: int, dim: int) -> torch.Tensor:
    """The chunk of rank ``index``, empty if torch.chunk gives fewer chunks."""
    chunks = torch.chunk(whole, ranks, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


def partial_axes(layout: Layout) -> list[int]:
    return [axis for axis, p in enumerate(layout) if isinstance(p, Partial)]


def draw_shards(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, dict[Coordinate, torch.Tensor]]:
    """(whole tensor, its shards) with small random integers, different ones on each rank of a pending axis, so that sums are exact."""
    draw = torch.Generator().manual_seed(seed)
    pending = partial_axes(layout)
    terms = torch.randint(-3, 4, [*(mesh_shape[a] for a in pending), *shape], generator=draw).to(dtype)
    whole = terms
    for axis in pending:
        whole = REDUCE[layout[axis].reduce_op](whole, 0)
    return whole, {c: shard(terms[tuple(c[a] for a in pending)], layout, mesh_shape, c) for c in coordinates(mesh_shape)}


def assert_is_sharded(
    whole: torch.Tensor, shards: Mapping[Coordinate, torch.Tensor], layout: Layout, mesh_shape: Sequence[int], what: str = ""
) -> None:
    """Asserts that each rank holds its shard of ``whole``, and that the terms of ranks on a pending axis reduce to it."""
    pending = partial_axes(layout)
    for c in coordinates(mesh_shape):
        if any(c[a] for a in pending):
            continue
        places = [dict(zip(pending, i, strict=True)) for i in coordinates([mesh_shape[a] for a in pending])]
        group = [tuple(place.get(a, index) for a, index in enumerate(c)) for place in places]
        terms = torch.stack([shards[g] for g in group]).reshape([*(mesh_shape[a] for a in pending), *shards[c].shape])
        for axis in pending:
            terms = REDUCE[layout[axis].reduce_op](terms, 0)
        expected = shard(whole, layout, mesh_shape, c)
        torch.testing.assert_close(terms, expected, rtol=1e-12, atol=1e-12, msg=lambda m, c=c: f"{what} rank {c} in {layout}: {m}")
