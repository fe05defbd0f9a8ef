"""Sample tensors for operator tests, from fixed seeds. Most sizes give uneven or empty shards on 2, 3 and 4 ranks."""

from __future__ import annotations

import zlib

import torch


def real(*shape: int) -> torch.Tensor:
    """Normal numbers; the same shape gives the same numbers."""
    seed = zlib.crc32(repr(shape).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return real(*shape).abs() + 0.1


def whole(high: int, *shape: int) -> torch.Tensor:
    """Integers from 0 to ``high - 1``."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + len(shape)))


def yes_no(*shape: int) -> torch.Tensor:
    return real(*shape) > 0
