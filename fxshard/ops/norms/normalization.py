"""Decomposed batch norm in training: each sum over the batch is a node of its own, which a sharded batch leaves pending.

With N elements per channel: mean = sum x / N, var = sum (x - mean)^2 / N, y = (x - mean) / sqrt(var + eps) w + b. The
second sum ("spread") is around the mean of the whole batch, since the difference of mean squares would cancel digits.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.ops.norms.softmax import accumulation_dtype


def to_accumulation_dtype(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype of sums: float32 for half precision, as in torch's kernels."""
    return x.to(accumulation_dtype(x.dtype))


def _over(x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Reshapes a vector over the channels, dim 1 of x, to broadcast with x."""
    return to_accumulation_dtype(vector).view(-1, *[1] * (x.dim() - 2))


def _rest(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def sum_kernel(x: torch.Tensor) -> torch.Tensor:
    return to_accumulation_dtype(x).sum(_rest(x))


def spread_kernel(x: torch.Tensor, total: torch.Tensor, count: int) -> torch.Tensor:
    return (to_accumulation_dtype(x) - _over(x, total / count)).square().sum(_rest(x))


def statistics_kernel(total: torch.Tensor, spread: torch.Tensor, count: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return total / count, (spread / count + eps).rsqrt()


def running_kernel(
    mean: torch.Tensor, var: torch.Tensor, total: torch.Tensor, spread: torch.Tensor, count: int, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    new_mean = mean * (1 - momentum) + total / count * momentum
    new_var = var * (1 - momentum) + spread / (count - 1) * momentum
    return new_mean.to(mean.dtype), new_var.to(var.dtype)


def normalise_kernel(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    scale = rstd if weight is None else rstd * weight
    out = (to_accumulation_dtype(x) - _over(x, mean)) * _over(x, scale)
    return (out if bias is None else out + _over(x, bias)).to(x.dtype).contiguous()


def backward_sums_kernel(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    own = to_accumulation_dtype(grad)
    scaled = (own * (to_accumulation_dtype(x) - _over(x, mean))).sum(_rest(x)) * rstd
    return torch.stack([own.sum(_rest(x)), scaled])


def backward_kernel(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor, sums: torch.Tensor, count: int
) -> torch.Tensor:
    plain, scaled = (sums / count).unbind()
    normal = (to_accumulation_dtype(x) - _over(x, mean)) * _over(x, rstd * scaled)
    out = (to_accumulation_dtype(grad) - _over(x, plain) - normal) * _over(x, rstd if weight is None else rstd * weight)
    return out.to(grad.dtype).contiguous()


@torch.library.custom_op("fxshard::channel_sum", mutates_args=())
def channel_sum(x: torch.Tensor) -> torch.Tensor:
    """sum of x [n, c, ...] over all dims but the second -> [c]."""
    return sum_kernel(x)


@channel_sum.register_fake
def _(x: Any) -> torch.Tensor:
    return _channels(x)


@torch.library.custom_op("fxshard::channel_spread", mutates_args=())
def channel_spread(x: torch.Tensor, total: torch.Tensor, count: int) -> torch.Tensor:
    """sum of (x - total / count)^2 over all dims of x [n, c, ...] but the second -> [c]; total is [c]."""
    return spread_kernel(x, total, count)


@channel_spread.register_fake
def _(x: Any, total: Any, count: int) -> torch.Tensor:
    return _channels(x)


@torch.library.custom_op("fxshard::batch_statistics", mutates_args=())
def batch_statistics(total: torch.Tensor, spread: torch.Tensor, count: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / sqrt(variance + eps)) of ``count`` elements from their sum and their spread, all [c]."""
    return statistics_kernel(total, spread, count, eps)


@batch_statistics.register_fake
def _(total: Any, spread: Any, count: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(total), torch.empty_like(total)


@torch.library.custom_op("fxshard::running_statistics", mutates_args=())
def running_statistics(
    mean: torch.Tensor, var: torch.Tensor, total: torch.Tensor, spread: torch.Tensor, count: int, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running mean and (unbiased) variance moved to those of this batch by ``momentum``, all [c]."""
    return running_kernel(mean, var, total, spread, count, momentum)


@running_statistics.register_fake
def _(mean: Any, var: Any, total: Any, spread: Any, count: int, momentum: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(mean), torch.empty_like(var)


@torch.library.custom_op("fxshard::normalise", mutates_args=())
def normalise(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """(x - mean) rstd weight + bias of x [n, c, ...] with vectors [c]."""
    return normalise_kernel(x, mean, rstd, weight, bias)


@normalise.register_fake
def _(x: Any, mean: Any, rstd: Any, weight: Any, bias: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fxshard::batch_norm_sums", mutates_args=())
def batch_norm_sums(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Sums over all dims but the second of grad and of grad (x - mean) rstd -> [2, c]: the gradients of bias and weight."""
    return backward_sums_kernel(grad, x, mean, rstd)


@batch_norm_sums.register_fake
def _(grad: Any, x: Any, mean: Any, rstd: Any) -> torch.Tensor:
    return mean.new_empty([2, x.shape[1]])


@torch.library.custom_op("fxshard::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor, sums: torch.Tensor, count: int
) -> torch.Tensor:
    """Gradient of x, with ``sums`` of the whole batch from ``batch_norm_sums``."""
    return backward_kernel(grad, x, weight, mean, rstd, sums, count)


@batch_norm_backward.register_fake
def _(grad: Any, x: Any, weight: Any, mean: Any, rstd: Any, sums: Any, count: int) -> torch.Tensor:
    return grad.new_empty(grad.shape)


def _channels(x: Any) -> Any:
    return x.new_empty([x.shape[1]], dtype=accumulation_dtype(x.dtype))
