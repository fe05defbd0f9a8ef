"""Private names of DTensor and ``torch.distributed.checkpoint`` (2.13): shards that are several blocks of a tensor.

DTensor tells torch's planner of checkpoints which block of the tensor a rank holds. A packed shard is several. What would replace it: a
public hook of the planner, or a placement with parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.dtensor.packed import PackedShard

if TYPE_CHECKING:  # slow to import
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Block(Protocol):
    """A block of a shard: its offset and shape in the whole tensor, and where it is in the shard."""

    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def here(self) -> tuple[slice, ...]: ...


Blocks = Callable[[DTensor], Sequence[Block]]


@functools.cache
def save_by_blocks(blocks: Blocks) -> None:
    """From now on ``torch.distributed.checkpoint`` writes and reads each block of a packed DTensor; ``blocks`` gives those of this rank."""
    owner: Any = DTensor
    write, chunks, shard = owner.__create_write_items__, owner.__create_chunk_list__, owner.__get_tensor_shard__

    def held(tensor: DTensor) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        local = tensor.to_local()
        some = [b for b in blocks(tensor) if 0 not in b.shape]
        return [(ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)), local[b.here]) for b in some]

    def create_write_items(self: DTensor, name: str, value: Any) -> list[WriteItem]:
        if not _is_packed(self):
            found: list[WriteItem] = write(self, name, value)
            return found
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, size = TensorProperties.create_from_tensor(self.to_local()), self.size()
        return [
            WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, None, TensorWriteData(chunk, properties, size))
            for chunk, _ in held(self)
        ]

    def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
        found: list[ChunkStorageMetadata] = [chunk for chunk, _ in held(self)] if _is_packed(self) else chunks(self)
        return found

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        if not _is_packed(self):
            found: torch.Tensor = shard(self, index)
            return found
        return next(value for chunk, value in held(self) if chunk.offsets == index.offset)

    owner.__create_write_items__, owner.__create_chunk_list__, owner.__get_tensor_shard__ = (
        create_write_items,
        create_chunk_list,
        get_tensor_shard,
    )


def _is_packed(tensor: DTensor) -> bool:
    return any(isinstance(p, PackedShard) for p in tensor.placements)
