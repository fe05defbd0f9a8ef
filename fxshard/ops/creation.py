"""``fxshard::constant``: a small literal tensor in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.types import Number

MAX_CONSTANT_ELEMENTS = 1024
"""Most elements of a literal tensor in a graph; larger tensors should be buffers of the model."""


@torch.library.custom_op("fxshard::constant", mutates_args=())
def constant(values: Sequence[Number], shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """``values`` in row-major order as a tensor of ``shape``."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(shape)


@constant.register_fake
def _(values: Any, shape: Any, dtype: Any, device: Any = None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
