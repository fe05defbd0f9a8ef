"""Cutting a global tensor into a rank's shard, and putting shards together again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import Partial

from fxshard.errors import RunError
from fxshard.graph.planning_graph import UNKNOWN
from fxshard.layout.layouts import Layout, local_offset, local_shape
from fxshard.mesh.mesh import Mesh

Coordinate = tuple[int, ...]
DIFFER = (
    "an operator of yours that draws random numbers gives each rank its own: draw outside of it and pass the numbers in; if there is "
    "none, a rule or a step is wrong, please report it"
)


def scatter(value: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: Coordinate) -> torch.Tensor:
    """The shard of ``value`` on the rank at ``coordinate``; a pending sum lies on the first rank of its axis."""
    shape = tuple(value.shape)
    for dim, (offset, length) in enumerate(
        zip(local_offset(shape, layout, mesh.shape, coordinate), local_shape(shape, layout, mesh.shape, coordinate), strict=True)
    ):
        value = value.narrow(dim, offset, length)
    for placement, index in zip(layout, coordinate, strict=True):
        if isinstance(placement, Partial) and index > 0 and placement.reduce_op in ("sum", "product"):
            value = torch.full_like(value, 0 if placement.reduce_op == "sum" else 1)
    return value.contiguous()


def gather(shards: Mapping[Coordinate, torch.Tensor], layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> torch.Tensor:
    """The global tensor of ``shape``; raises RunError when ranks that should hold the same differ."""
    pieces = dict(shards)
    for axis in range(mesh.ndim):
        placement = layout[axis]
        if isinstance(placement, Partial):
            pieces = _reduced(pieces, axis, placement.reduce_op)
    first = next(iter(pieces.values()))
    if UNKNOWN in shape:  # replicated, so any rank tells its size
        shape = tuple(first.shape)
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    written: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate, piece in pieces.items():
        offset = local_offset(shape, layout, mesh.shape, coordinate)
        key = (*offset, *piece.shape)
        if key in written and not _same(written[key], piece):
            raise RunError(f"replicas differ in a result with layout {layout}", remedy=DIFFER)
        written[key] = piece
        whole[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece
    return whole


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for the last digits, NaN being itself: some of LAPACK's results differ in them by where in memory a matrix lies.

    Floats of eight bits have no last digits to spare.
    """
    if a.dtype.itemsize == 1 and a.is_floating_point():  # torch compares none of them
        return torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a, b, rtol=64 * torch.finfo(a.dtype).eps, atol=0, equal_nan=True)
    return torch.equal(a, b)


def _reduced(pieces: Mapping[Coordinate, torch.Tensor], axis: int, op: str) -> dict[Coordinate, torch.Tensor]:
    groups: dict[Coordinate, list[torch.Tensor]] = {}
    for coordinate, piece in pieces.items():
        groups.setdefault((*coordinate[:axis], 0, *coordinate[axis + 1 :]), []).append(piece)
    combine = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}[op]
    return {c: combine(torch.stack(group), 0) for c, group in groups.items()}
