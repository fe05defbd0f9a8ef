"""Argument checks for torch functions that fxshard rewrites."""

from __future__ import annotations

import torch
from torch import Tensor


def check(holds: bool | Tensor, message: str, error: type[Exception] = RuntimeError) -> None:
    """Raises ``error`` if a bool is False. A 0-dim tensor, whose value is unknown while tracing, is checked when the graph runs."""
    if isinstance(holds, Tensor):
        torch.ops.aten._assert_async.msg(holds, message)
    elif not holds:
        raise error(message)
