"""Makes the second derivative of a sharded program an error; autograd would silently treat its gradients as constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxshard.errors import RunError


def forbid_double_backward(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """``gradients`` of a backward under ``create_graph=True``; differentiating one of them raises RunError.

    torch's ``once_differentiable`` raises only if an input of the backward requires a gradient. Usually none does, although the gradients
    depend on parameters.
    """
    with torch.enable_grad():
        given = [None if g is None else _NoDoubleBackward.apply(g.detach().requires_grad_()) for g in gradients]
    return tuple(given)


class _NoDoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RunError(
            "a gradient of a sharded program is differentiated again: its backward has no backward",
            remedy="take a second derivative inside the model (torch.func.grad in its forward), or on one device",
        )
