"""Argument checks for torch functions that fxshard rewrites."""

from __future__ import annotations

from torch import Tensor

from fxshard._torch_compat.operators import assert_async


def check(holds: bool | Tensor, message: str, error: type[Exception] = RuntimeError) -> None:
    """Raises ``error`` if a bool is False. A 0-dim tensor, whose value is unknown while tracing, is checked when the graph runs."""
    if isinstance(holds, Tensor):
        assert_async(holds, message)
    elif not holds:
        raise error(message)
