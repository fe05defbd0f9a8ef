"""The local tensors of DTensors, without autograd and without asking DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local_like(value: Any, like: DTensor) -> torch.Tensor | None:
    """The shard of ``value`` on this rank; None unless it is a plain tensor of a DTensor that lies as ``like`` does."""
    if not isinstance(value, DTensor) or type(value._local_tensor) is not torch.Tensor:
        return None
    a, b = value._spec, like._spec
    same = a is b or (a.placements == b.placements and a.shape == b.shape and a.mesh == b.mesh)
    return value._local_tensor if same else None


def spec_of(value: DTensor) -> Any:
    """What says how ``value`` lies: compared by identity, it tells whether it lies as before."""
    return value._spec
