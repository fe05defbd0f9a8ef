"""Layer and group norm in parts: each sum over the normalised dims is a node, so that shards of them leave it pending.

With N elements normalised together: mean = sum x / N, var = sum (x - mean)^2 / N, y = (x - mean) / sqrt(var + eps) w + b.
Sums keep their dims, with size 1; weights align with the last dims of x. Half precision is summed in float32, as torch's
kernels do, and mean and rstd stay in it; those that are given may be narrower. (RMS norm is traced as the operators that
torch makes of it.)
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from fxshard.ops.norms.normalization import wide
from fxshard.ops.norms.softmax import precise

Vector: TypeAlias = torch.Tensor | None


def sum_kernel(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return wide(x).sum(dims, keepdim=True)


def mean_kernel(total: torch.Tensor, count: int) -> torch.Tensor:
    return total / count


def spread_kernel(x: torch.Tensor, total: torch.Tensor, count: int, dims: list[int]) -> torch.Tensor:
    return (wide(x) - total / count).square().sum(dims, keepdim=True)


def rstd_kernel(spread: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    return (spread / count + eps).rsqrt()


def normalise_kernel(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    out = _scaled((wide(x) - mean) * rstd, weight)
    return (out if bias is None else out + wide(bias)).to(x.dtype).contiguous()


def backward_sums_kernel(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, dims: list[int]
) -> torch.Tensor:
    inner = _scaled(wide(grad), weight)
    scaled = inner * (wide(x) - mean) * rstd
    return torch.stack([inner.sum(dims, keepdim=True), scaled.sum(dims, keepdim=True)])


def backward_kernel(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, sums: torch.Tensor, count: int
) -> torch.Tensor:
    plain, scaled = (sums / count).unbind()
    return ((_scaled(wide(grad), weight) - plain - (wide(x) - mean) * rstd * scaled) * rstd).to(x.dtype).contiguous()


def weight_kernel(grad: torch.Tensor, x: Vector, mean: Vector, rstd: Vector, dims: list[int], alone: bool = False) -> torch.Tensor:
    own = wide(grad) if x is None else wide(grad) * (wide(x) - mean) * rstd
    return own.sum(dims) if dims else own.clone()


def _scaled(x: torch.Tensor, weight: Vector) -> torch.Tensor:
    return x if weight is None else x * wide(weight)


@torch.library.custom_op("fxshard::row_sum", mutates_args=())
def row_sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """sum of x over dims, kept with size 1."""
    return sum_kernel(x, dims)


@row_sum.register_fake
def _(x: Any, dims: list[int]) -> torch.Tensor:
    return _rows(x, dims)


@torch.library.custom_op("fxshard::row_mean", mutates_args=())
def row_mean(total: torch.Tensor, count: int) -> torch.Tensor:
    """total / count."""
    return mean_kernel(total, count)


@row_mean.register_fake
def _(total: Any, count: int) -> torch.Tensor:
    return torch.empty_like(total)


@torch.library.custom_op("fxshard::row_spread", mutates_args=())
def row_spread(x: torch.Tensor, total: torch.Tensor, count: int, dims: list[int]) -> torch.Tensor:
    """sum of (x - total / count)^2 over dims, kept with size 1; total is shaped as the result."""
    return spread_kernel(x, total, count, dims)


@row_spread.register_fake
def _(x: Any, total: Any, count: int, dims: list[int]) -> torch.Tensor:
    return _rows(x, dims)


@torch.library.custom_op("fxshard::row_rstd", mutates_args=())
def row_rstd(spread: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    """1 / sqrt(spread / count + eps)."""
    return rstd_kernel(spread, count, eps)


@row_rstd.register_fake
def _(spread: Any, count: int, eps: float) -> torch.Tensor:
    return torch.empty_like(spread)


@torch.library.custom_op("fxshard::row_normalise", mutates_args=())
def row_normalise(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    """(x - mean) rstd weight + bias."""
    return normalise_kernel(x, mean, rstd, weight, bias)


@row_normalise.register_fake
def _(x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fxshard::row_norm_sums", mutates_args=())
def row_norm_sums(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, dims: list[int]
) -> torch.Tensor:
    """Over dims, kept with size 1, the sums of grad weight and of grad weight (x - mean) rstd, stacked in front."""
    return backward_sums_kernel(grad, x, mean, rstd, weight, dims)


@row_norm_sums.register_fake
def _(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, dims: list[int]) -> torch.Tensor:
    return rstd.new_empty([2, *rstd.shape], dtype=precise(rstd.dtype))


@torch.library.custom_op("fxshard::row_norm_backward", mutates_args=())
def row_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Vector, sums: torch.Tensor, count: int
) -> torch.Tensor:
    """Gradient of x, with the sums of ``row_norm_sums``."""
    return backward_kernel(grad, x, mean, rstd, weight, sums, count)


@row_norm_backward.register_fake
def _(grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, sums: Any, count: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fxshard::row_norm_weight", mutates_args=())
def row_norm_weight(grad: torch.Tensor, x: Vector, mean: Vector, rstd: Vector, dims: list[int], alone: bool = False) -> torch.Tensor:
    """sum of grad (x - mean) rstd over dims, which are left out: the gradient of the weight; without x that of the bias.

    ``alone``: no other gradient of the norm reads these tensors, which its cost asks.
    """
    return weight_kernel(grad, x, mean, rstd, dims)


@row_norm_weight.register_fake
def _(grad: Any, x: Any, mean: Any, rstd: Any, dims: list[int], alone: bool = False) -> torch.Tensor:
    return grad.new_empty([size for d, size in enumerate(grad.shape) if d not in dims], dtype=precise(grad.dtype))


def _rows(x: Any, dims: list[int]) -> Any:
    return x.new_empty([1 if d in dims else size for d, size in enumerate(x.shape)], dtype=precise(x.dtype))
