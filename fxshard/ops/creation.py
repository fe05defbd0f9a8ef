"""``fxshard::constant``: a small literal tensor in the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.types import Number

MAX_CONSTANT_ELEMENTS = 1024
"""Most elements of a literal tensor in a graph; larger tensors should be buffers of the model."""


@torch.library.custom_op("fxshard::constant", mutates_args=())
def constant(values: Sequence[Number], shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """``values`` in row-major order as a tensor of ``shape``."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(shape)


constant.register_fake(lambda values, shape, dtype, device=None: torch.empty(shape, dtype=dtype, device=device))
