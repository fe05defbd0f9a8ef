"""``fxshard::assigned``: notes, while a model is captured, which tensor was assigned to a buffer. A planning graph has none."""

from __future__ import annotations

import torch

torch.library.define("fxshard::assigned", "(Tensor value, str buffer) -> ()")
torch.fx.has_side_effect(torch.ops.fxshard.assigned.default)


@torch.library.impl("fxshard::assigned", "CompositeExplicitAutograd")
def assigned(value: torch.Tensor, buffer: str) -> None:
    """Does nothing."""
