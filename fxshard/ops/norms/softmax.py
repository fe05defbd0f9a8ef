"""Softmax over one dim in pieces, so that the dim may be cut: a maximum, a sum of exponentials, then each element alone.

softmax(x) = exp(x - m) / s and log_softmax(x) = x - m - log s, where m = max x and s = sum exp(x - m) over the dim.
Statistics have the shape of x without the dim; sums are float32 where x has half precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def shifted(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    """x - m in the dtype of sums."""
    return (x - m.unsqueeze(dim)) if x.dtype == precise(x.dtype) else x.to(precise(x.dtype)) - m.to(precise(m.dtype)).unsqueeze(dim)


def exp_sum(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    return shifted(x, m, dim).exp().sum(dim)


@torch.library.custom_op("fxshard::sum_exp", mutates_args=())
def sum_exp(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    """s = sum exp(x - m) over ``dim``; m has the shape of x without it."""
    return exp_sum(x, m, dim).contiguous()


@sum_exp.register_fake
def _(x: Any, m: Any, dim: int) -> torch.Tensor:
    return m.new_empty(m.shape, dtype=precise(x.dtype))


def normalised(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    if kind == "log":
        return (shifted(x, m, dim) - s.log().unsqueeze(dim)).to(dtype)
    y = shifted(x, m, dim).exp() / s.unsqueeze(dim)
    return (torch.where((m == -math.inf).unsqueeze(dim), 0, y) if kind == "safe" else y).to(dtype)


@torch.library.custom_op("fxshard::softmax", mutates_args=())
def softmax(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """exp(x - m) / s ("exp"), the same with 0 where all of a row is -inf ("safe"), or x - m - log s ("log")."""
    return normalised(x, m, s, dim, kind, dtype).contiguous()


@softmax.register_fake
def _(x: Any, m: Any, s: Any, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def product_sum(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    return (a.to(precise(a.dtype)) * b.to(precise(b.dtype))).sum(dim)


@torch.library.custom_op("fxshard::sum_product", mutates_args=())
def sum_product(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    """sum a b over ``dim``."""
    return product_sum(a, b, dim).contiguous()


@sum_product.register_fake
def _(a: Any, b: Any, dim: int) -> torch.Tensor:
    return a.new_empty([*a.shape[:dim], *a.shape[dim + 1 :]], dtype=torch.promote_types(precise(a.dtype), precise(b.dtype)))


def gradient(grad: torch.Tensor, y: torch.Tensor, d: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    grad, y = grad.to(precise(grad.dtype)), y.to(precise(y.dtype))
    return (grad - y.exp() * d.unsqueeze(dim) if kind == "log" else y * (grad - d.unsqueeze(dim))).to(dtype)


@torch.library.custom_op("fxshard::softmax_backward", mutates_args=())
def softmax_backward(grad: torch.Tensor, y: torch.Tensor, d: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """y (grad - d) with d = sum grad y; for "log" grad - exp(y) d with d = sum grad."""
    return gradient(grad, y, d, dim, kind, dtype).contiguous()


@softmax_backward.register_fake
def _(grad: Any, y: Any, d: Any, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)
