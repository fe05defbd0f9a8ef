"""``fxshard::returned``: notes, while a model is traced, which tensors a call of a module returned. A planning graph has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

torch.library.define("fxshard::returned", "(Tensor?[] values, str module) -> ()")
torch.fx.has_side_effect(torch.ops.fxshard.returned.default)


@torch.library.impl("fxshard::returned", "CompositeExplicitAutograd")
def returned(values: Sequence[torch.Tensor | None], module: str) -> None:
    """Does nothing."""
