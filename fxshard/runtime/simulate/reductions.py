"""Simulated all-reduce and reduce-scatter, in the order in which a backend adds up the ranks' tensors, in their dtype.

``exact``: rank 0, then 1, and so on. ``gloo``: gloo's ring, in which chunk c starts at rank c - 1 and travels to lower ranks.
``nccl``: NCCL's ring, in which chunk c starts at rank c + 1 and travels to higher ranks. Both end at rank c, so each chunk is summed
in an order of its own. Each hop rounds to the dtype, so that bfloat16 results have the backend's rounding errors. A reduce-scatter on gloo
is that of programs: each rank reduces the blocks that it receives (see ``fxshard.runtime.groups.reduce_scatter``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from fxshard.errors import OptionError, RunError, closest
from fxshard.runtime.groups.reduce_scatter import reduce_blocks

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COMBINE: dict[str, Combine] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}

SEGMENT = 1 << 20
"""Bytes of the largest segment that gloo sends at once."""


def reduce_tensors(tensors: Sequence[torch.Tensor], op: str, order: str = "exact") -> torch.Tensor:
    """The reduction ``op`` over ``tensors``, one per rank, of equal shapes; an average is the sum, divided at the end."""
    if op not in COMBINE:
        raise RunError(f"the simulator knows no reduction {op!r}{closest(op, COMBINE)}", remedy=f"use one of {', '.join(COMBINE)}")
    total = REDUCTIONS[order](tensors, COMBINE[op])
    return total / len(tensors) if op == "avg" else total


def scatter_tensors(tensors: Sequence[torch.Tensor], op: str, order: str = "exact") -> list[torch.Tensor]:
    """The results of a reduce-scatter along dim 0: for each rank its block of the reduction."""
    n = len(tensors)
    if order != "gloo":
        return [part.clone() for part in reduce_tensors(tensors, op, order).chunk(n)]
    blocks = zip(*(t.chunk(n) for t in tensors), strict=True)
    return [reduce_blocks(torch.cat(own), op, n) for own in blocks]


def check_reduction(name: object) -> None:
    """Raises OptionError for a name that ``REDUCTIONS`` lacks."""
    if not isinstance(name, str) or name not in REDUCTIONS:
        raise OptionError(f"unknown reduction {name!r}{closest(name, REDUCTIONS)}", remedy=f"use one of {', '.join(REDUCTIONS)}")


def _in_rank_order(tensors: Sequence[torch.Tensor], combine: Combine) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    return total


def _gloo(tensors: Sequence[torch.Tensor], combine: Combine) -> torch.Tensor:
    """The all-reduce of torch 2.13's gloo backend."""
    chunk = gloo_chunk(tensors[0].numel(), tensors[0].element_size(), len(tensors))
    return _ring(tensors, combine, chunk, step=-1)


def _nccl(tensors: Sequence[torch.Tensor], combine: Combine) -> torch.Tensor:
    """NCCL's ring on one channel in one round, with chunks of equal size; for reduce-scatter the chunks are the ranks' blocks."""
    return _ring(tensors, combine, -(-tensors[0].numel() // len(tensors)), step=1)


def gloo_chunk(elements: int, itemsize: int, ranks: int) -> int:
    """Elements per chunk of gloo's ring: a chunk has two or more whole segments of equal size."""
    total = elements * itemsize
    segments = _round_up(max(-(-total // SEGMENT), 2 * ranks), ranks)
    return segments // ranks * (_round_up(-(-total // segments), itemsize) // itemsize)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _ring(tensors: Sequence[torch.Tensor], combine: Combine, chunk: int, step: int) -> torch.Tensor:
    """Chunk ``c`` starts at rank ``c + step`` and visits all ranks in that direction, rank ``c`` last."""
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
"""The reduction orders by name."""
