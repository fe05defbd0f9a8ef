"""``fxshard::einsum``: a contraction of two tensors. Its gradients are contractions too, so that all matmuls are one operator."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxshard.ops.kernels import KERNELS


@torch.library.custom_op("fxshard::einsum", mutates_args=())
def einsum(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """``torch.einsum`` of two operands; every letter occurs in at least two of a, b and the result, at most once in each."""
    return torch.einsum(equation, a, b).contiguous()


def einsum_kernel(a: Any, b: Any, equation: str) -> Any:
    """``einsum`` as one aten.mm or aten.bmm, with permutes and reshapes only if the equation requires them."""
    left, right, result = split(equation)
    batch = [x for x in result if x in left and x in right]
    rows = [x for x in result if x not in right]
    columns = [x for x in result if x not in left]
    if rows and columns and result.index(columns[0]) < result.index(rows[0]):
        return einsum_kernel(b, a, f"{right},{left}->{result}")
    inner = [x for x in left if x in right and x not in result]
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    x = _matrix(a, left, batch, rows, inner, sizes)
    y = _matrix(b, right, batch, inner, columns, sizes)
    out = torch.bmm(x, y) if batch else torch.mm(x, y)
    order = [*batch, *rows, *columns]
    return _permuted(_shaped(out, [sizes[i] for i in order]), [order.index(i) for i in result]).contiguous()


def _matrix(x: Any, letters: str, batch: list[str], rows: list[str], columns: list[str], sizes: dict[str, Any]) -> Any:
    """``x`` as [batch, rows, columns], or [rows, columns] without batch letters.

    If ``x`` has its columns first, returns a transposed view, so that all users of ``x`` can share one copy if a reshape needs it.
    """
    if rows and columns and letters.index(columns[0]) < letters.index(rows[0]):
        return _matrix(x, letters, batch, columns, rows, sizes).transpose(-1, -2)
    groups = [batch, rows, columns] if batch else [rows, columns]
    moved = _permuted(x, [letters.index(i) for group in groups for i in group])
    return _shaped(moved, [math.prod(sizes[i] for i in group) for group in groups])


def _permuted(x: Any, order: list[int]) -> Any:
    return x if order == sorted(order) else x.permute(order)


def _shaped(x: Any, shape: list[Any]) -> Any:
    return x if list(x.shape) == shape else x.reshape(shape)


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
    a, b = (x.conj() if x.is_complex() else x for x in ctx.saved_tensors)  # torch's gradients are conjugated
    left, right, result = split(ctx.equation)
    to_a = torch.ops.fxshard.einsum(grad, b, f"{result},{right}->{left}") if ctx.needs_input_grad[0] else None
    to_b = torch.ops.fxshard.einsum(grad, a, f"{result},{left}->{right}") if ctx.needs_input_grad[1] else None
    return to_a, to_b, None


KERNELS[torch.ops.fxshard.einsum.default] = einsum_kernel
einsum.register_autograd(_backward, setup_context=_setup)
