"""A placement that shards each part of a dim: for a weight such as ``[q | k | v]``, of which every rank needs its heads of each part.

It derives from torch's private ``_StridedShard``, which it equals in meaning if all parts have one size, and replaces the method that the
others are built on (2.13). So DTensor gathers and redistributes such tensors. ``keep_packed`` lets DTensor's operators keep the placement,
so that changes in place work. What would replace both: a public placement with parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._collective_utils import pad_tensor
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import Placement, _StridedShard, _StridedShardOffsetMode

from fxshard.errors import RunError


class Parts(int):
    """The number of parts, as torch's split factor, that knows their sizes: where torch makes a placement for another dim, or for a result,
    from the split factor of a packed one, the new one is packed as well."""

    sizes: tuple[int, ...]

    def __new__(cls, sizes: tuple[int, ...]) -> Parts:
        made = super().__new__(cls, len(sizes))
        made.sizes = tuple(sizes)
        return made

    def __str__(self) -> str:
        return str(self.sizes)

    def __format__(self, form: str) -> str:
        return str(self.sizes)


class PackedShard(_StridedShard):
    """Cuts each part of a dim over the ranks of the axis, as ``Shard`` cuts a tensor; a rank holds its shards of the parts, in order.

    Args:
        dim: the tensor dim, not negative.
        parts: the sizes of the parts, in elements of the dim; their sum is its size. Empty in a user's request for the parts into which the
            model takes the dim.
    """

    parts: tuple[int, ...]

    def __init__(self, dim: int, parts: tuple[int, ...] = (), *, split_factor: Any = None) -> None:
        known = split_factor if isinstance(split_factor, Parts) else Parts(parts)
        super().__init__(dim, split_factor=max(len(known.sizes), 1))
        self.parts = known.sizes
        self._known = known
        self._hash = hash((dim, self.parts))

    @property
    def split_factor(self) -> Parts:
        """The parts, in the place of torch's number of groups of one size."""
        return self._known

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
            raise RunError(what, remedy="use tensor.full_tensor(), or redistribute it first")
        return size, offsets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedShard) and self.dim == other.dim and self.parts == other.parts

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"PackedShard({self.dim}, {self.parts})"

    __str__ = __repr__

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """For graphs that hold the placement: the text that makes it, and the names in it."""
        return repr(self), {"PackedShard": PackedShard}

    def __reduce__(self) -> tuple[type[PackedShard], tuple[Any, ...]]:
        return PackedShard, (self.dim, self.parts)


def without_strides(placements: Sequence[Placement]) -> list[Placement]:
    """``placements`` with a ``Shard`` of the same dim in place of torch's ``_StridedShard``, which an operator on shards may leave."""
    return [Shard(p.dim) if type(p) is _StridedShard else p for p in placements]


@functools.cache
def keep_packed() -> None:
    """From now on DTensor's operators keep packed placements wherever they keep strided ones; to be called before DTensor decides on such
    an operator for the first time (a ``detach``, from 2.14 on), as it remembers. Views that would merge or split a packed dim
    raise RunError."""
    propagate = _view_ops.propagate_shape_and_sharding
    _StridedShard.__new__ = _new
    _view_ops.propagate_shape_and_sharding = functools.wraps(propagate)(functools.partial(_propagated, propagate))


def _new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    """``_StridedShard(dim, split_factor=parts)`` is a PackedShard if ``parts`` are Parts."""
    packed = cls is _StridedShard and isinstance(kwargs.get("split_factor"), Parts)
    return torch._C._distributed.StridedShard.__new__(PackedShard if packed else cls)


def _propagated(
    plain: Any, placements: Sequence[Placement], shape: Any, rule: Sequence[Any], mesh_sizes: Any, strict_view: bool = False
) -> tuple[Sequence[Placement], Sequence[Placement]]:
    """torch's (placements of the operand, of the result) of a view, with packed dims that it only moves."""
    packed = {axis: p for axis, p in enumerate(placements) if isinstance(p, PackedShard)}
    others = [Replicate() if axis in packed else p for axis, p in enumerate(placements)]
    needed, given = map(list, plain(others, shape, rule, mesh_sizes, strict_view))
    for axis, p in packed.items():
        moved = [d for d, source in enumerate(rule) if source == _view_ops.InputDim(p.dim)]
        if moved:
            needed[axis], given[axis] = p, PackedShard(moved[0], p.parts)
        else:
            what = f"a view would merge or split dim {p.dim}, which is packed in parts of {p.parts}"
            raise RunError(what, remedy="use tensor.full_tensor(), or redistribute it first")
    return needed, given


def _chunks(part: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """``count`` chunks of ceil size along ``dim``; the last ones may be short or empty."""
    size = part.size(dim)
    step = -(-size // count)
    ends = [min(i * step, size) for i in range(count + 1)]
    return [part.narrow(dim, start, end - start) for start, end in itertools.pairwise(ends)]
