"""A placement that shards each part of a dim: for a weight such as ``[q | k | v]``, of which every rank needs its heads of each part.

It derives from torch's private ``_StridedShard``, of which it is an instance wherever all parts have one size, and replaces the one method
that the others are built on (2.13). So DTensor gathers and redistributes such tensors. What would replace it: a public placement with parts.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.tensor.placement_types import _StridedShard, _StridedShardOffsetMode

from fxshard.errors import RunError


class PackedShard(_StridedShard):
    """Cuts each part of a dim over the ranks of the axis, as ``Shard`` would cut a tensor of its own; a rank holds its shards of the parts, in
    order.

    Args:
        dim: the tensor dim, not negative.
        parts: the sizes of the parts, in elements of the dim; their sum is its size.
    """

    parts: tuple[int, ...]

    def __init__(self, dim: int, parts: tuple[int, ...]) -> None:
        super().__init__(dim, split_factor=len(parts))
        self.parts = tuple(parts)
        self._hash = hash((dim, self.parts))

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        """The shards of all ranks, without padding, and how many elements each lacks of the longest."""
        pieces = [_chunks(part, num_chunks, self.dim) for part in tensor.split(list(self.parts), self.dim)]
        shards = [torch.cat(of_rank, self.dim) for of_rank in zip(*pieces, strict=True)]
        longest = max(shard.size(self.dim) for shard in shards)
        lacking = [longest - shard.size(self.dim) for shard in shards] if with_padding else []
        return shards, lacking

    def _local_shard_size_and_offset(
        self,
        curr_local_size: int,
        num_chunks: int,
        rank: Any,
        offset_mode: _StridedShardOffsetMode = _StridedShardOffsetMode.FIRST,
    ) -> tuple[int, int | list[int] | None]:
        """As in torch, for callers that take the shard for one block of the tensor; raises RunError if it is not and they want its offset."""
        size, offsets = self.local_shard_size_and_offset(curr_local_size, num_chunks, rank, offset_mode)
        if isinstance(offsets, list) and offsets and offsets[-1] - offsets[0] >= size:
            what = f"a shard of a tensor with its dim {self.dim} packed in parts of {self.parts} is not one block of it"
            raise RunError(what, remedy="save with fxshard.save_checkpoint, or pass tensor.full_tensor()")
        return size, offsets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedShard) and self.dim == other.dim and self.parts == other.parts

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"PackedShard({self.dim}, {self.parts})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[PackedShard], tuple[Any, ...]]:
        return PackedShard, (self.dim, self.parts)


def _chunks(part: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """``count`` chunks of ceil size along ``dim``; the last ones may be short or empty."""
    size = part.size(dim)
    step = -(-size // count)
    ends = [min(i * step, size) for i in range(count + 1)]
    return [part.narrow(dim, start, end - start) for start, end in itertools.pairwise(ends)]
