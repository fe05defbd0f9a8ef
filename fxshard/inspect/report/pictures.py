"""Which rank holds which part of a tensor, as data for a picture: any number of dims and mesh axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fxshard.graph.planning_graph import UNKNOWN
from fxshard.layout.layouts import Layout, nested_chunk, packed_chunks

Pieces = tuple[tuple[int, int], ...]
"""(offset, length) of each contiguous piece of a dim: one, or one for each part of a packed dim."""


@dataclass(frozen=True)
class Cut:
    """A dim that mesh axes shard: for each combination of indexes on ``axes``, the last axis fastest, the pieces of the dim that the ranks
    with these indexes hold."""

    dim: int
    axes: tuple[int, ...]
    pieces: tuple[Pieces, ...]


def cuts_of(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> tuple[Cut, ...] | None:
    """The cut dims of a tensor of global ``shape``; None if the layout alone does not tell which elements a rank holds: rows on the ranks
    of their experts, or a size known only at run time."""
    if UNKNOWN in shape or layout.expert_axes or layout.is_folded:
        return None
    cuts = []
    for dim, size in enumerate(shape):
        packed = layout.packed_on(dim)
        if packed is not None:
            axis, placement = packed
            ranks = mesh_shape[axis]
            cuts.append(Cut(dim, (axis,), tuple(tuple(packed_chunks(placement.parts, ranks, k)) for k in range(ranks))))
        elif axes := layout.axes_on(dim):
            counts = tuple(mesh_shape[axis] for axis in axes)
            places = itertools.product(*map(range, counts))
            cuts.append(Cut(dim, axes, tuple((nested_chunk(size, counts, place),) for place in places)))
    return tuple(cuts)
