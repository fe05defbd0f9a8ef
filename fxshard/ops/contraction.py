"""``fxshard::einsum``: a contraction of two tensors. Its gradients are contractions again, so matmuls stay one operator."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("fxshard::einsum", mutates_args=())
def einsum(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """``torch.einsum`` of two operands; every letter occurs in at least two of a, b and the result, once in each."""
    return torch.einsum(equation, a, b).contiguous()


def split(equation: str) -> tuple[str, str, str]:
    """Letters of a, b and the result."""
    operands, result = equation.split("->")
    a, b = operands.split(",")
    return a, b, result


@einsum.register_fake
def _(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    left, right, result = split(equation)
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    return a.new_empty([sizes[letter] for letter in result])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.equation = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    a, b = ctx.saved_tensors
    left, right, result = split(ctx.equation)
    to_a = torch.ops.fxshard.einsum(grad, b, f"{result},{right}->{left}") if ctx.needs_input_grad[0] else None
    to_b = torch.ops.fxshard.einsum(grad, a, f"{result},{left}->{right}") if ctx.needs_input_grad[1] else None
    return to_a, to_b, None


einsum.register_autograd(_backward, setup_context=_setup)
