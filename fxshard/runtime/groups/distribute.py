"""Distributes one rank's tensor over a mesh, like DTensor's ``distribute_tensor``, but for any size and from any rank.

Goes through the axes in mesh order. Each rank that has a block sends it along the next axis: its shards if the layout shards on that axis,
else the whole block. On a sharded axis, the sender sends only the others' shards, and no rank sends a block twice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.errors import OptionError
from fxshard.layout.layouts import Layout, chunk, packed_chunks, placement_str


def distribute(value: torch.Tensor, layout: Layout, device_mesh: DeviceMesh, source: int) -> torch.Tensor:
    """This rank's shard of the ``value`` of rank ``source`` (global number); other ranks' values give only shape and dtype.

    ``layout`` must be sharded or replicated on each axis; raises OptionError for a pending sum. Shards may be uneven or empty. Every
    rank of the mesh calls this.
    """
    here = tuple(device_mesh.get_coordinate() or ())
    start = tuple(int(i) for i in (device_mesh.mesh == source).nonzero()[0])
    block, shape = value.contiguous(), tuple(value.shape)
    for axis, placement in enumerate(layout):
        size, parts = int(device_mesh.shape[axis]), [shape] * int(device_mesh.shape[axis])
        if isinstance(placement, Shard):
            dim = placement.dim
            parts = [(*shape[:dim], chunk(shape[dim], size, i)[1], *shape[dim + 1 :]) for i in range(size)]
        elif isinstance(placement, PackedShard):
            dim = placement.dim
            lengths = [sum(length for _, length in packed_chunks(placement.parts, size, i)) for i in range(size)]
            parts = [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]
            block = _in_order_of_ranks(block, placement, size)
        elif not placement.is_replicate():
            raise OptionError(f"{placement_str(placement)} is a pending sum", remedy="give a layout of shards and replicas")
        if here[axis + 1 :] == start[axis + 1 :] and size > 1:
            shape = parts[here[axis]]
            if here[axis] != start[axis]:
                block = torch.empty(shape, dtype=value.dtype, device=value.device)
            block = _send_along_axis(block, placement, parts, device_mesh.get_group(axis), here[axis], start[axis])
        shape = parts[here[axis]]
    return block


def _send_along_axis(
    block: torch.Tensor, placement: object, parts: list[tuple[int, ...]], group: dist.ProcessGroup, here: int, start: int
) -> torch.Tensor:
    """Part ``here`` of ``parts``, sent by member ``start`` of ``group``, as bytes, because every backend can send those."""
    if not isinstance(placement, Shard | PackedShard):
        if block.numel():
            dist.broadcast(_as_bytes(block), group=group, group_src=start)
        return block
    if here != start:
        if block.numel():
            dist.recv(_as_bytes(block), group=group, group_src=start)
        return block
    own, offset = block, 0
    for other, shape in enumerate(parts):
        part = block.narrow(placement.dim, offset, shape[placement.dim]).contiguous()
        offset += shape[placement.dim]
        if other == here:
            own = part.clone()
        elif part.numel():
            dist.send(_as_bytes(part), group=group, group_dst=other)
    return own


def _in_order_of_ranks(block: torch.Tensor, placement: PackedShard, ranks: int) -> torch.Tensor:
    """A packed dim with the shards of the ranks one after another."""
    chunks = [packed_chunks(placement.parts, ranks, rank) for rank in range(ranks)]
    pieces = [block.narrow(placement.dim, start, length) for of_rank in chunks for start, length in of_rank]
    return torch.cat(pieces, placement.dim)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
