"""The order in which a simulated all-reduce or reduce-scatter adds up what the ranks of a group hold, in the tensors' dtype.

``exact``: rank 0, then 1, and so on. ``gloo``: gloo's ring, in which a chunk starts at the rank before its own and travels down.
``nccl``: NCCL's ring, in which it starts at the rank behind its own and travels up. Each hop rounds to the dtype, so that bfloat16
shows what the backend would give. In a ring, each chunk has an order of its own. A reduce-scatter on gloo is what programs do there:
each rank adds up the blocks that it was sent (see ``exchange``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from fxshard.errors import OptionError, RunError, closest
from fxshard.runtime.groups.exchange import add_up

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COMBINE: dict[str, Combine] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}

SEGMENT = 1 << 20
"""Bytes of the largest piece that gloo sends at once."""


def reduce_tensors(tensors: Sequence[torch.Tensor], op: str, order: str = "exact") -> torch.Tensor:
    """The reduction ``op`` over ``tensors``, one a rank, alike in shape; an average is the sum, divided at the end."""
    if op not in COMBINE:
        raise RunError(f"the simulator knows no reduction {op!r}{closest(op, COMBINE)}", remedy=f"use one of {', '.join(COMBINE)}")
    total = REDUCTIONS[order](tensors, COMBINE[op])
    return total / len(tensors) if op == "avg" else total


def scatter_tensors(tensors: Sequence[torch.Tensor], op: str, order: str = "exact") -> list[torch.Tensor]:
    """What a reduce-scatter along dim 0 leaves each rank: its own block of the reduction."""
    n = len(tensors)
    if order != "gloo":
        return [part.clone() for part in reduce_tensors(tensors, op, order).chunk(n)]
    blocks = zip(*(t.chunk(n) for t in tensors), strict=True)
    return [add_up(torch.cat(own), op, n) for own in blocks]


def check_reduction(name: object) -> None:
    """Raises OptionError for a name that is none of ``REDUCTIONS``."""
    if not isinstance(name, str) or name not in REDUCTIONS:
        raise OptionError(f"unknown reduction {name!r}{closest(name, REDUCTIONS)}", remedy=f"use one of {', '.join(REDUCTIONS)}")


def _in_rank_order(tensors: Sequence[torch.Tensor], combine: Combine) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    return total


def _gloo(tensors: Sequence[torch.Tensor], combine: Combine) -> torch.Tensor:
    """What torch 2.13's gloo backend does in an all-reduce."""
    chunk = gloo_chunk(tensors[0].numel(), tensors[0].element_size(), len(tensors))
    return _ring(tensors, combine, chunk, step=-1)


def _nccl(tensors: Sequence[torch.Tensor], combine: Combine) -> torch.Tensor:
    """NCCL's ring on one channel in one round: chunks of equal size. For reduce-scatter the chunks are the ranks' parts."""
    return _ring(tensors, combine, -(-tensors[0].numel() // len(tensors)), step=1)


def gloo_chunk(elements: int, itemsize: int, ranks: int) -> int:
    """Elements of a chunk of gloo's ring: a chunk consists of whole segments, two or more, alike in size."""
    total = elements * itemsize
    segments = _up(max(-(-total // SEGMENT), 2 * ranks), ranks)
    return segments // ranks * (_up(-(-total // segments), itemsize) // itemsize)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _ring(tensors: Sequence[torch.Tensor], combine: Combine, chunk: int, step: int) -> torch.Tensor:
    """Chunk ``c`` starts at rank ``c + step`` and passes all others in that direction; rank ``c`` comes last."""
    n = len(tensors)
    flat = [t.reshape(-1) for t in tensors]
    whole = torch.empty_like(flat[0])
    for c in range(n if chunk else 0):
        part = slice(c * chunk, (c + 1) * chunk)
        total = flat[(c + step) % n][part]
        for k in range(2, n + 1):
            total = combine(flat[(c + k * step) % n][part], total)
        whole[part] = total
    return whole.view(tensors[0].shape)


REDUCTIONS: dict[str, Callable[[Sequence[torch.Tensor], Combine], torch.Tensor]] = {"exact": _in_rank_order, "gloo": _gloo, "nccl": _nccl}
"""The orders by their names."""
