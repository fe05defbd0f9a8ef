"""Decomposed layer and group norm: each sum over the normalised dims is a node of its own, which sharded dims leave pending.

With N elements normalised together: mean = sum x / N, var = sum (x - mean)^2 / N, y = (x - mean) / sqrt(var + eps) w + b.
Sums keep their dims, with size 1; weights align with the last dims of x. Half precision is summed in float32, as in torch's
kernels; mean and rstd are then float32 too, but may be passed in narrower. (RMS norm is traced in torch's decomposition.)
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from fxshard.ops.kernels import operator
from fxshard.ops.norms.softmax import accumulation_dtype, to_accumulation_dtype

Vector: TypeAlias = torch.Tensor | None


def _scaled(x: torch.Tensor, weight: Vector) -> torch.Tensor:
    return x if weight is None else x * to_accumulation_dtype(weight)


def _rows(x: Any, dims: list[int]) -> Any:
    return x.new_empty([1 if d in dims else size for d, size in enumerate(x.shape)], dtype=accumulation_dtype(x.dtype))


@operator(_rows)
def row_sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """sum of x over dims, kept with size 1."""
    return to_accumulation_dtype(x).sum(dims, keepdim=True)


@operator(lambda total, count: torch.empty_like(total))
def row_mean(total: torch.Tensor, count: int) -> torch.Tensor:
    """total / count."""
    return total / count


@operator(lambda x, total, count, dims: _rows(x, dims))
def row_spread(x: torch.Tensor, total: torch.Tensor, count: int, dims: list[int]) -> torch.Tensor:
    """sum of (x - total / count)^2 over dims, kept with size 1; total is shaped as the result."""
    return (to_accumulation_dtype(x) - total / count).square().sum(dims, keepdim=True)


@operator(lambda spread, *_: torch.empty_like(spread))
def row_rstd(spread: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    """1 / sqrt(spread / count + eps)."""
    return (spread / count + eps).rsqrt()


@operator(lambda x, *_: x.new_empty(x.shape))
def row_normalise(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    """(x - mean) rstd weight + bias."""
    out = _scaled((to_accumulation_dtype(x) - mean) * rstd, weight)
    return (out if bias is None else out + to_accumulation_dtype(bias)).to(x.dtype).contiguous()


@operator(lambda grad, x, mean, rstd, *_: rstd.new_empty([2, *rstd.shape], dtype=accumulation_dtype(rstd.dtype)))
def row_norm_sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, dims: list[int]
) -> torch.Tensor:
    """The sums over dims, kept with size 1, of grad weight and of grad weight (x - mean) rstd, stacked along a new first dim."""
    inner = _scaled(to_accumulation_dtype(grad), weight)
    scaled = inner * (to_accumulation_dtype(x) - mean) * rstd
    return torch.stack([inner.sum(dims, keepdim=True), scaled.sum(dims, keepdim=True)])


@operator(lambda grad, x, *_: x.new_empty(x.shape))
def row_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, sums: torch.Tensor, count: int
) -> torch.Tensor:
    """Gradient of x, with the sums of ``row_norm_sums``."""
    plain, scaled = (sums / count).unbind()
    return (
        ((_scaled(to_accumulation_dtype(grad), weight) - plain - (to_accumulation_dtype(x) - mean) * rstd * scaled) * rstd)
        .to(x.dtype)
        .contiguous()
    )


def _without(grad: Any, x: Any, mean: Any, rstd: Any, dims: list[int], *_: Any) -> Any:
    return grad.new_empty([size for d, size in enumerate(grad.shape) if d not in dims], dtype=accumulation_dtype(grad.dtype))


@operator(_without)
def row_norm_weight(grad: torch.Tensor, x: Vector, mean: Vector, rstd: Vector, dims: list[int], alone: bool = False) -> torch.Tensor:
    """The sum of grad (x - mean) rstd over dims, which are removed: the gradient of the weight; without x, that of the bias.

    ``alone``: no other gradient of the norm reads these tensors; only the cost model uses this.
    """
    own = to_accumulation_dtype(grad) if x is None else to_accumulation_dtype(grad) * (to_accumulation_dtype(x) - mean) * rstd
    return own.sum(dims) if dims else own.clone()
