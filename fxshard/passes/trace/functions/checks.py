"""What torch's functions check of their arguments, where fxshard spells them out."""

from __future__ import annotations

import torch
from torch import Tensor


def check(holds: bool | Tensor, message: str, error: type[Exception] = RuntimeError) -> None:
    """What is known while tracing raises ``error``; what values decide (a tensor of no dims) is checked when the graph runs."""
    if isinstance(holds, Tensor):
        torch.ops.aten._assert_async.msg(holds, message)
    elif not holds:
        raise error(message)
