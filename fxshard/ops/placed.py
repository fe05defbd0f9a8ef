"""``fxshard::placed`` and ``fxshard::handed_out``: what a model's own calls of DTensor's API say about layouts.

``placed`` is its operand, in the layout that ``DTensor.from_local`` or ``redistribute`` names, on the axes of their mesh
(``"S(1)"`` on ``"tp=4"``; without axes, those of the tensor). ``handed_out`` notes, during a trace, in which form a value is returned;
planning graphs do not contain it.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("fxshard::placed", mutates_args=())
def placed(x: torch.Tensor, layout: str, axes: str, declared: bool, kept: bool = False) -> torch.Tensor:
    """``x`` in ``layout``. ``declared``: whether the model declares that a local tensor is this shard, rather than asks for it. ``kept``:
    whether operators must read it in this layout, where they can."""
    return x.clone()


@torch.library.custom_op("fxshard::handed_out", mutates_args=())
def handed_out(x: torch.Tensor, form: str) -> torch.Tensor:
    """``x``, which the model hands out as the rank's shard (``form`` "local"), the whole tensor ("whole") or a DTensor ("dtensor")."""
    return x.clone()


def _unchanged(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


placed.register_fake(_unchanged)
handed_out.register_fake(_unchanged)
placed.register_autograd(lambda ctx, grad: (grad, None, None, None, None))
handed_out.register_autograd(lambda ctx, grad: (grad, None))
