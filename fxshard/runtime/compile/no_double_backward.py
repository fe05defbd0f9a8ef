"""Gradients that cannot be differentiated again: asking for that is an error, where autograd would take them for constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxshard.errors import RunError


def only_once(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """``gradients`` of a backward under ``create_graph=True``; a gradient taken through one of them is a RunError.

    torch's ``once_differentiable`` raises only where what came into the backward requires a gradient itself, which it mostly does not,
    though the gradients depend on parameters.
    """
    with torch.enable_grad():
        given = [None if g is None else _Once.apply(g.detach().requires_grad_()) for g in gradients]
    return tuple(given)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RunError(
            "a gradient of a sharded program is differentiated again: its backward has no backward",
            remedy="take a second derivative inside the model (torch.autograd.grad in its forward), or on one device",
        )
