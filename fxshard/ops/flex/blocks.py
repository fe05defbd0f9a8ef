"""The lists of blocks of a mask, from which torch's fused kernel knows which products to skip and where no mask need be evaluated.

As in torch's ``BlockMask``, but of a shard: they are made from the mask's function at the places of the shard's scores, by operators that
Inductor fuses, so that the mask itself is never in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxshard.ops.flex.functions import everywhere, function_of, place_of

SIZE = 128
"""Queries and keys in a block."""


def seen_scores(
    shape: Sequence[int], mask: str, tensors: Sequence[Tensor], offsets: Sequence[Tensor | None], device: torch.device
) -> Tensor:
    """Which of the scores of this shape [b, h, s, t] are seen: [b or 1, h or 1, s, t], 1 where the mask does not depend on the dim.

    ``offsets``: the place of the first batch, head and query, None for 0.
    """
    seen = everywhere(function_of(mask), 0, len(tensors))(*place_of(shape, (*offsets, None), device), *tensors)
    for dim in (0, 1):
        seen = seen.narrow(dim, 0, 1) if seen.stride(dim) == 0 else seen
    return seen


def block_lists(seen: Tensor) -> list[Tensor]:
    """Eight lists of blocks of ``seen`` [b, h, s, t], int32, in the order of torch's ``BlockMask``.

    Blocks of keys for each block of queries, first those that are seen in part, then those that are seen wholly; each as the number of
    blocks [b, h, blocks of queries] and their indices [b, h, blocks of queries, blocks of keys], zero after the last. Then the same of
    blocks of queries for each block of keys.
    """
    rows, columns = (-(-size // SIZE) for size in seen.shape[2:])
    padded = torch.nn.functional.pad(seen, (0, columns * SIZE - seen.shape[3], 0, rows * SIZE - seen.shape[2]))
    counts = padded.reshape(*seen.shape[:2], rows, SIZE, columns, SIZE).sum((3, 5))
    full = counts == SIZE * SIZE
    part = (counts > 0) & ~full
    return [one for blocks in (part, full, part.transpose(2, 3), full.transpose(2, 3)) for one in _listed(blocks)]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(the number of blocks in each row, their indices); what is not listed is written past the end."""
    last = blocks.shape[-1]
    place = torch.where(blocks, blocks.cumsum(-1) - 1, last)
    numbers = torch.arange(last, dtype=torch.int32, device=blocks.device).expand(blocks.shape)
    empty = torch.zeros((*blocks.shape[:-1], last + 1), dtype=torch.int32, device=blocks.device)
    return blocks.sum(-1, dtype=torch.int32), empty.scatter(-1, place, numbers)[..., :last].contiguous()
