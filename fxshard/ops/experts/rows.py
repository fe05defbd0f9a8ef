"""``fxshard::to_experts`` and ``from_experts``: where rows may travel to the ranks of their experts, and back.

On whole tensors both return their operand. Each is the other's backward.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.ops.kernels import operator


@operator(lambda rows, ids, experts: (rows.new_empty(rows.shape), ids.new_empty(ids.shape)))
def to_experts(rows: torch.Tensor, ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [t, k, h], ids [t, k]): row j of token i is for expert ids[i, j], in 0 .. experts - 1. Returns both, as new tensors."""
    return rows.clone(), ids.clone()


@operator(lambda rows, ids, experts: rows.new_empty(rows.shape))
def from_experts(rows: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """rows [t, k, h] as the experts return them. ``ids``: as given to ``to_experts``, not as returned by it."""
    return rows.clone()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ids, ctx.experts = inputs
    ctx.save_for_backward(ids)


def _to_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None]:
    return torch.ops.fxshard.from_experts(grad, *ctx.saved_tensors, ctx.experts), None, None


def _from_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.fxshard.to_experts(grad, *ctx.saved_tensors, ctx.experts)[0], None, None


torch.library.register_autograd("fxshard::to_experts", _to_backward, setup_context=_setup)
torch.library.register_autograd("fxshard::from_experts", _from_backward, setup_context=_setup)
