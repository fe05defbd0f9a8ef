"""Assigns each block of each tensor to one of the ranks that hold it, so that all write about the same number of bytes.

Every rank computes the assignment from the layouts, without communication; empty blocks are not written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from fxshard.errors import OptionError
from fxshard.layout.layouts import Layout, canonical, local_blocks
from fxshard.runtime.checkpoint.index import Chunk, Entry, Index

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape)"""


def ranks_of(tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...] | None:
    """The ranks of the DTensors' mesh, sorted; None without DTensors. Raises OptionError if their meshes have different ranks."""
    found: dict[tuple[int, ...], str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            found.setdefault(tuple(sorted(tensor.device_mesh.mesh.flatten().tolist())), name)
    if len(found) > 1:
        (a, one), (b, other) = list(found.items())[:2]
        what = f"{one} is on the ranks {list(a)}, {other} on {list(b)}"
        raise OptionError(what, remedy="place all tensors on one mesh, replicated over the axes that do not cut them")
    return next(iter(found), None)


def assign_writers(tensors: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> dict[str, Entry]:
    """The blocks of each tensor with the ranks that write them; a plain tensor is one block that all ranks hold."""
    load = [0] * len(ranks)
    entries = {}
    for name, tensor in tensors.items():
        chunks = []
        for (offset, shape), holders in _holders(name, tensor, ranks).items():
            writer = min(holders, key=lambda number: (load[number], number))
            load[writer] += math.prod(shape) * tensor.dtype.itemsize
            chunks.append(Chunk(writer, offset, shape))
        entries[name] = Entry(tensor.dtype, tuple(tensor.shape), tuple(chunks))
    return entries


def _holders(name: str, tensor: torch.Tensor, ranks: Sequence[int]) -> dict[Block, list[int]]:
    """The blocks of a tensor and, for each, the positions in ``ranks`` of the ranks that hold it."""
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return {}
    if not isinstance(tensor, DTensor):
        return {((0,) * len(shape), shape): list(range(len(ranks)))}
    mesh = tensor.device_mesh
    layout = canonical(Layout(tensor.placements), tuple(mesh.shape))
    if layout.has_partial:
        raise OptionError(f"{name} is a pending sum: {layout}", remedy="redistribute it before saving")
    sizes = tuple(mesh.shape)
    found: dict[Block, list[int]] = {}
    for coordinate in itertools.product(*map(range, sizes)):
        for block in local_blocks(shape, layout, sizes, coordinate):
            if math.prod(block.shape):
                found.setdefault((block.offset, block.shape), []).append(ranks.index(int(mesh.mesh[coordinate])))
    return {block: sorted(held) for block, held in found.items()}


def local_block(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The block of ``shape`` at ``offset``, which this rank holds."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    layout, mesh = Layout(tensor.placements), tensor.device_mesh
    held = local_blocks(tuple(tensor.shape), layout, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
    local = tensor.detach().to_local()
    return local if len(held) == 1 else next(local[b.here] for b in held if (b.offset, b.shape) == (offset, shape))


def with_checksums(index: Index, sums: Sequence[Mapping[str, str]]) -> Index:
    """``index`` with the checksums ``sums``: for each rank's file, by the name in it."""
    entries = {}
    for name, entry in index.entries.items():
        entries[name] = replace(entry, chunks=tuple(replace(c, crc32=sums[c.file][entry.key(name, c)]) for c in entry.chunks))
    return replace(index, entries=entries)
