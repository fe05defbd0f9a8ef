"""Computes a rank's shard of a global tensor, and the global tensor from all shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import Partial

from fxshard.errors import RunError
from fxshard.graph.planning_graph import UNKNOWN
from fxshard.layout.layouts import Block, Layout, local_blocks, local_shape
from fxshard.mesh.mesh import Mesh

Coordinate = tuple[int, ...]
REPLICAS_DIFFER_REMEDY = (
    "an operator of yours that draws random numbers gives each rank its own: draw outside of it and pass the numbers in; if there is "
    "no such operator, a rule or a step is wrong, please report it"
)


def scatter(value: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: Coordinate) -> torch.Tensor:
    """The shard of ``value`` on the rank at ``coordinate``; a pending sum is on the first rank of its axis, and zero on the others."""
    blocks = local_blocks(tuple(value.shape), layout, mesh.shape, coordinate)
    if len(blocks) == 1:
        value = value[blocks[0].there]
    else:
        value, whole = value.new_empty(local_shape(tuple(value.shape), layout, mesh.shape, coordinate)), value
        for block in blocks:
            value[block.here] = whole[block.there]
    for placement, index in zip(layout, coordinate, strict=True):
        if isinstance(placement, Partial) and index > 0 and placement.reduce_op in ("sum", "product"):
            value = torch.full_like(value, 0 if placement.reduce_op == "sum" else 1)
    return value.contiguous()


def gather(shards: Mapping[Coordinate, torch.Tensor], layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> torch.Tensor:
    """The global tensor of ``shape`` from all ranks' shards; raises RunError if replicas differ."""
    pieces = dict(shards)
    for axis in range(mesh.ndim):
        placement = layout[axis]
        if isinstance(placement, Partial):
            pieces = _reduce_axis(pieces, axis, placement.reduce_op)
    first = next(iter(pieces.values()))
    if UNKNOWN in shape:  # replicated, so that any shard has the full size
        shape = tuple(first.shape)
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    written: dict[Block, torch.Tensor] = {}
    for coordinate, piece in pieces.items():
        for block in local_blocks(shape, layout, mesh.shape, coordinate):
            own = piece[block.here]
            if block in written and not _close(written[block], own):
                raise RunError(f"replicas differ in a result with layout {layout}", remedy=REPLICAS_DIFFER_REMEDY)
            written[block] = own
            whole[block.there] = own
    return whole


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding, with NaN equal to NaN: some LAPACK results depend on the alignment of a matrix.

    Eight-bit floats must be equal exactly.
    """
    if a.dtype.itemsize == 1 and a.is_floating_point():  # which torch.allclose does not support
        return torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a, b, rtol=64 * torch.finfo(a.dtype).eps, atol=0, equal_nan=True)
    return torch.equal(a, b)


def _reduce_axis(pieces: Mapping[Coordinate, torch.Tensor], axis: int, op: str) -> dict[Coordinate, torch.Tensor]:
    groups: dict[Coordinate, list[torch.Tensor]] = {}
    for coordinate, piece in pieces.items():
        groups.setdefault((*coordinate[:axis], 0, *coordinate[axis + 1 :]), []).append(piece)
    combine = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}[op]
    return {c: combine(torch.stack(group), 0) for c, group in groups.items()}
