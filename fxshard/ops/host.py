"""``fxshard::from_host``: copies a parameter's shard from the memory of the host to the device; and the count of such copies.

Only local graphs have it. On the CPU a copy stands for what a GPU would hold. The CUDA side has not been run yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Traffic:
    """Bytes and copies to the device (``inward``) and to the host (``outward``)."""

    inward: int = 0
    outward: int = 0
    copies: int = 0


_COUNTING: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Counts the copies between device and host of this process within the block."""
    found = Traffic()
    _COUNTING.append(found)
    try:
        yield found
    finally:
        _COUNTING.remove(found)


def count(size: int, *, inward: bool) -> None:
    """Counts one copy of ``size`` bytes."""
    for one in _COUNTING:
        one.copies += 1
        one.inward += size if inward else 0
        one.outward += 0 if inward else size


@torch.library.custom_op("fxshard::from_host", mutates_args=())
def from_host(input: torch.Tensor, half: str) -> torch.Tensor:
    """``input`` on the device. ``half``: "forward" or "backward", which each copy it anew."""
    count(input.nbytes, inward=True)
    if not torch.cuda.is_available() or input.is_cuda:
        return input.clone()
    return input.to("cuda", non_blocking=True)


from_host.register_fake(lambda input, half: torch.empty_like(input))


def to_host(value: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient in the memory of the host, pinned if it comes from a GPU."""
    count(value.nbytes, inward=False)
    if not value.is_cuda:
        return value.clone()
    host = torch.empty_like(value, device="cpu", pin_memory=True)
    host.copy_(value, non_blocking=True)
    torch.cuda.current_stream(value.device).synchronize()  # whoever reads the gradient does so on the host
    return host
