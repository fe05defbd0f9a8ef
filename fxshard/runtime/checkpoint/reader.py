"""A checkpoint opened for reading, in any of its formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import FileError
from fxshard.files import REMAKE
from fxshard.layout.layouts import Layout, local_blocks, local_shape
from fxshard.runtime.checkpoint.index import Chunk, Entry, Index, missing


def _empty(shape: tuple[int, ...], dtype: torch.dtype, name: str, where: str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        raise FileError(f"there is no memory for {name!r} of shape {list(shape)}", where=where, remedy=REMAKE) from error


@dataclass(frozen=True)
class Source:
    """An open checkpoint. ``block`` reads one block of a tensor, by the tensor's name. ``identity``: a text unique to this checkpoint."""

    index: Index
    block: Callable[[str, Chunk], torch.Tensor]
    where: str
    identity: str

    def entry(self, name: str) -> Entry:
        found = self.index.entries.get(self.index.aliases.get(name, name))
        if found is None:
            raise missing(name, self.where)
        return found

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor, on the host."""
        shape = self.entry(name).shape
        return self.region(name, (0,) * len(shape), shape)

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The part with ``shape`` at ``offset``, on the host; raises FileError unless the blocks cover it exactly once."""
        entry, name = self.entry(name), self.index.aliases.get(name, name)
        out = _empty(tuple(shape), entry.dtype, name, self.where)
        found = 0
        for chunk in entry.chunks:
            spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in zip(offset, shape, chunk.offset, chunk.shape, strict=True)]
            if any(start >= end for start, end in spans):
                continue
            value = self.block(name, chunk)
            if value.dtype != entry.dtype or tuple(value.shape) != chunk.shape:
                raise FileError(f"a block of {name!r} is {tuple(value.shape)} {value.dtype}", where=self.where, remedy=REMAKE)
            here = tuple(slice(start - a, end - a) for (start, end), a in zip(spans, offset, strict=True))
            out[here] = value[tuple(slice(start - b, end - b) for (start, end), b in zip(spans, chunk.offset, strict=True))]
            found += math.prod(end - start for start, end in spans)
        if found != out.numel():
            raise FileError(f"the blocks of {name!r} do not cover it exactly once", where=self.where, remedy=REMAKE)
        return out

    def shard(self, name: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
        """This rank's shard of a tensor with ``placements`` on ``mesh``."""
        shape, layout, coordinate = self.entry(name).shape, Layout(placements), tuple(mesh.get_coordinate() or ())
        sizes = tuple(mesh.shape)
        blocks = local_blocks(shape, layout, sizes, coordinate)
        if len(blocks) == 1:
            return self.region(name, blocks[0].offset, blocks[0].shape)
        out = torch.empty(local_shape(shape, layout, sizes, coordinate), dtype=self.entry(name).dtype)
        for block in blocks:
            out[block.here] = self.region(name, block.offset, block.shape)
        return out

    def fill(self, target: torch.Tensor, name: str) -> None:
        """Copies a tensor, or this rank's shard of it, into ``target``, which has the same shape and dtype."""
        with torch.no_grad():
            if isinstance(target, DTensor):
                target.detach().to_local().copy_(self.shard(name, target.device_mesh, target.placements))
            else:
                target.detach().copy_(self.whole(name))
