"""Softmax over one dim, decomposed into a maximum, a sum of exponentials and an elementwise part, so that the dim can be sharded.

softmax(x) = exp(x - m) / s and log_softmax(x) = x - m - log s, where m = max x and s = sum exp(x - m) over the dim.
Statistics have the shape of x without the dim; sums are float32 where x has half precision.
"""

from __future__ import annotations

import math

import torch

from fxshard.ops.kernels import operator


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``dtype`` is summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def to_accumulation_dtype(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype of sums: float32 for half precision, as in torch's kernels."""
    return x.to(accumulation_dtype(x.dtype))


def minus_max(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    """x - m in the dtype of sums."""
    return (
        (x - m.unsqueeze(dim))
        if x.dtype == accumulation_dtype(x.dtype)
        else to_accumulation_dtype(x) - to_accumulation_dtype(m).unsqueeze(dim)
    )


@operator(lambda x, m, dim: m.new_empty(m.shape, dtype=accumulation_dtype(x.dtype)))
def sum_exp(x: torch.Tensor, m: torch.Tensor, dim: int) -> torch.Tensor:
    """s = sum exp(x - m) over ``dim``; m has the shape of x without it."""
    return minus_max(x, m, dim).exp().sum(dim)


@operator(lambda x, m, s, dim, kind, dtype: x.new_empty(x.shape, dtype=dtype))
def softmax(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """By ``kind``: exp(x - m) / s ("exp"), the same but 0 if a whole row is -inf ("safe"), or x - m - log s ("log")."""
    if kind == "log":
        return (minus_max(x, m, dim) - s.log().unsqueeze(dim)).to(dtype)
    y = minus_max(x, m, dim).exp() / s.unsqueeze(dim)
    return (torch.where((m == -math.inf).unsqueeze(dim), 0, y) if kind == "safe" else y).to(dtype)


def _product(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    dtype = torch.promote_types(accumulation_dtype(a.dtype), accumulation_dtype(b.dtype))
    return a.new_empty([*a.shape[:dim], *a.shape[dim + 1 :]], dtype=dtype)


@operator(_product)
def sum_product(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    """sum a b over ``dim``."""
    return (to_accumulation_dtype(a) * to_accumulation_dtype(b)).sum(dim)


@operator(lambda grad, y, d, dim, kind, dtype: grad.new_empty(grad.shape, dtype=dtype))
def softmax_backward(grad: torch.Tensor, y: torch.Tensor, d: torch.Tensor, dim: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """y (grad - d) with d = sum grad y; for "log" grad - exp(y) d with d = sum grad."""
    grad, y = to_accumulation_dtype(grad), to_accumulation_dtype(y)
    return (grad - y.exp() * d.unsqueeze(dim) if kind == "log" else y * (grad - d.unsqueeze(dim))).to(dtype)
