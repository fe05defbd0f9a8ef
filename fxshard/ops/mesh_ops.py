"""``fxshard::axis_index``: the rank's index on a mesh axis, the only rank-dependent node of a lowered graph."""

from __future__ import annotations

import torch


@torch.library.custom_op("fxshard::axis_index", mutates_args=())
def axis_index(axis: str) -> torch.Tensor:
    """Index of this rank on ``axis``, an int64 scalar tensor; ``bind`` and the simulator replace it by its value."""
    raise RuntimeError(f"axis_index({axis!r}) has no value before the program is bound to a mesh")


axis_index.register_fake(lambda axis: torch.empty((), dtype=torch.int64))
