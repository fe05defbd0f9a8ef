"""``fxshard::assigned``: records, during a trace, which tensor was assigned to a buffer. Planning graphs do not contain it."""

from __future__ import annotations

import torch

torch.library.define("fxshard::assigned", "(Tensor value, str buffer) -> ()")
torch.fx.has_side_effect(torch.ops.fxshard.assigned.default)


@torch.library.impl("fxshard::assigned", "CompositeExplicitAutograd")
def assigned(value: torch.Tensor, buffer: str) -> None:
    """Does nothing."""
