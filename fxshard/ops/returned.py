"""``fxshard::returned``: records, during a trace, which tensors a module's call returned. Planning graphs do not contain it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

torch.library.define("fxshard::returned", "(Tensor?[] values, str module) -> ()")
torch.fx.has_side_effect(torch.ops.fxshard.returned.default)


@torch.library.impl("fxshard::returned", "CompositeExplicitAutograd")
def returned(values: Sequence[torch.Tensor | None], module: str) -> None:
    """Does nothing."""
