"""A placement that shards each part of a dim: for a weight such as ``[q | k | v]``, of which every rank needs its heads of each part.

It derives from torch's private ``_StridedShard``, which it equals in meaning if all parts have one size, and replaces the method that the
others are built on (2.13). So DTensor gathers and redistributes such tensors. ``keep_packed`` teaches DTensor's operators to keep the
placement, so that changes in place work. What would replace both: a public placement with parts.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.distributed.tensor._collective_utils import pad_tensor
from torch.distributed.tensor._ops import single_dim_strategy
from torch.distributed.tensor.placement_types import _StridedShard, _StridedShardOffsetMode

from fxshard.errors import RunError


class PackedShard(_StridedShard):
    """Cuts each part of a dim over the ranks of the axis, as ``Shard`` cuts a tensor; a rank holds its shards of the parts, in order.

    Args:
        dim: the tensor dim, not negative.
        parts: the sizes of the parts, in elements of the dim; their sum is its size.
    """

    parts: tuple[int, ...]

    def __init__(self, dim: int, parts: tuple[int, ...]) -> None:
        super().__init__(dim, split_factor=_split_factor(parts))
        self.parts = tuple(parts)
        self._hash = hash((dim, self.parts))

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        """The shards of all ranks; with padding, all as long as the longest, and by how much each was padded."""
        pieces = [_chunks(part, num_chunks, self.dim) for part in tensor.split(list(self.parts), self.dim)]
        shards = [torch.cat(of_rank, self.dim) for of_rank in zip(*pieces, strict=True)]
        if not with_padding:
            return shards, []
        longest = max(shard.size(self.dim) for shard in shards)
        lacking = [longest - shard.size(self.dim) for shard in shards]
        return [pad_tensor(shard, self.dim, size) for shard, size in zip(shards, lacking, strict=True)], lacking

    def _local_shard_size_and_offset(
        self,
        curr_local_size: int,
        num_chunks: int,
        rank: Any,
        offset_mode: _StridedShardOffsetMode = _StridedShardOffsetMode.FIRST,
    ) -> tuple[int, int | list[int] | None]:
        """For callers that take a shard for one block of the tensor: raises RunError if it is not one and they want its offset."""
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


def _split_factor(parts: tuple[int, ...]) -> int:
    """The number of parts if they have one size. Otherwise no number of groups describes them, so it is one that does not divide the dim: then
    torch's views refuse the placement, or replicate the tensor, instead of cutting it into equal groups."""
    if len(set(parts)) == 1:
        return len(parts)
    return next(factor for factor in itertools.count(len(parts)) if sum(parts) % factor)


@functools.cache
def keep_packed() -> None:
    """From now on an operator of DTensor that keeps the dims of its operands, such as a pointwise one, keeps packed placements too."""
    plain = single_dim_strategy._fill_single_dim_strategy_placeholders

    @functools.wraps(plain)
    def filled(unique: set[Any], strategies: list[list[Any]]) -> list[list[Any]]:
        packed = sorted((p for p in unique if isinstance(p, PackedShard)), key=lambda p: (p.dim, p.parts))
        found = plain(unique.difference(packed), strategies)
        for parts in dict.fromkeys(p.parts for p in packed):
            for one in strategies:
                if any(isinstance(p, single_dim_strategy._ShardingPlaceholder) for p in one):
                    found.append([PackedShard(p.dim, parts) if isinstance(p, single_dim_strategy._ShardingPlaceholder) else p for p in one])
        return found

    single_dim_strategy._fill_single_dim_strategy_placeholders = filled


def _chunks(part: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """``count`` chunks of ceil size along ``dim``; the last ones may be short or empty."""
    size = part.size(dim)
    step = -(-size // count)
    ends = [min(i * step, size) for i in range(count + 1)]
    return [part.narrow(dim, start, end - start) for start, end in itertools.pairwise(ends)]
