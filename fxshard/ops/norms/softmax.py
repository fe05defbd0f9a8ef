"""Softmax over one dim, decomposed into a maximum, a sum of exponentials and an elementwise part, so that the dim can be sharded.

softmax(x) = exp(x - m) / s and log_softmax(x) = x - m - log s, where m = max x and s = sum exp(x - m) over the dim.
Statistics have the shape of x without the dim; sums are float32 where x has half precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``dtype`` is summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def minus_max(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    """x - m in the dtype of sums."""
    return (
        (x - m.unsqueeze(dim))
        if x.dtype == accumulation_dtype(x.dtype)
        else x.to(accumulation_dtype(x.dtype)) - m.to(accumulation_dtype(m.dtype)).unsqueeze(dim)
    )


def sum_exp_kernel(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    return minus_max(x, m, dim).exp().sum(dim)


@torch.library.custom_op("fxshard::sum_exp", mutates_args=())
def sum_exp(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    """s = sum exp(x - m) over ``dim``; m has the shape of x without it."""
    return sum_exp_kernel(x, m, dim).contiguous()


@sum_exp.register_fake
def _(x: Any, m: Any, dim: int) -> torch.Tensor:
    return m.new_empty(m.shape, dtype=accumulation_dtype(x.dtype))


def softmax_kernel(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "log":
        return (minus_max(x, m, dim) - s.log().unsqueeze(dim)).to(dtype)
    y = minus_max(x, m, dim).exp() / s.unsqueeze(dim)
    return (torch.where((m == -math.inf).unsqueeze(dim), 0, y) if kind == "safe" else y).to(dtype)


@torch.library.custom_op("fxshard::softmax", mutates_args=())
def softmax(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """By ``kind``: exp(x - m) / s ("exp"), the same but 0 if a whole row is -inf ("safe"), or x - m - log s ("log")."""
    return softmax_kernel(x, m, s, dim, kind, dtype).contiguous()


@softmax.register_fake
def _(x: Any, m: Any, s: Any, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def sum_product_kernel(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    return (a.to(accumulation_dtype(a.dtype)) * b.to(accumulation_dtype(b.dtype))).sum(dim)


@torch.library.custom_op("fxshard::sum_product", mutates_args=())
def sum_product(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    """sum a b over ``dim``."""
    return sum_product_kernel(a, b, dim).contiguous()


@sum_product.register_fake
def _(a: Any, b: Any, dim: int) -> torch.Tensor:
    return a.new_empty(
        [*a.shape[:dim], *a.shape[dim + 1 :]], dtype=torch.promote_types(accumulation_dtype(a.dtype), accumulation_dtype(b.dtype))
    )


def softmax_backward_kernel(grad: torch.Tensor, y: torch.Tensor, d: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    grad, y = grad.to(accumulation_dtype(grad.dtype)), y.to(accumulation_dtype(y.dtype))
    return (grad - y.exp() * d.unsqueeze(dim) if kind == "log" else y * (grad - d.unsqueeze(dim))).to(dtype)


@torch.library.custom_op("fxshard::softmax_backward", mutates_args=())
def softmax_backward(grad: torch.Tensor, y: torch.Tensor, d: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """y (grad - d) with d = sum grad y; for "log" grad - exp(y) d with d = sum grad."""
    return softmax_backward_kernel(grad, y, d, dim, kind, dtype).contiguous()


@softmax_backward.register_fake
def _(grad: Any, y: Any, d: Any, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)
