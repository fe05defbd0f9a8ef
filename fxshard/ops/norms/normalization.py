"""Decomposed batch norm in training: each sum over the batch is a node of its own, which a sharded batch leaves pending.

With N elements per channel: mean = sum x / N, var = sum (x - mean)^2 / N, y = (x - mean) / sqrt(var + eps) w + b. The
second sum ("spread") is around the mean of the whole batch, since the difference of mean squares would cancel digits.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.ops.kernels import operator
from fxshard.ops.norms.softmax import accumulation_dtype, to_accumulation_dtype


def _over(x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Reshapes a vector over the channels, dim 1 of x, to broadcast with x."""
    return to_accumulation_dtype(vector).view(-1, *[1] * (x.dim() - 2))


def _rest(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _channels(x: Any, *_: Any) -> Any:
    return x.new_empty([x.shape[1]], dtype=accumulation_dtype(x.dtype))


@operator(_channels)
def channel_sum(x: torch.Tensor) -> torch.Tensor:
    """sum of x [n, c, ...] over all dims but the second -> [c]."""
    return to_accumulation_dtype(x).sum(_rest(x))


@operator(_channels)
def channel_spread(x: torch.Tensor, total: torch.Tensor, count: int) -> torch.Tensor:
    """sum of (x - total / count)^2 over all dims of x [n, c, ...] but the second -> [c]; total is [c]."""
    return (to_accumulation_dtype(x) - _over(x, total / count)).square().sum(_rest(x))


@operator(lambda total, *_: (torch.empty_like(total), torch.empty_like(total)))
def batch_statistics(total: torch.Tensor, spread: torch.Tensor, count: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / sqrt(variance + eps)) of ``count`` elements from their sum and their spread, all [c]."""
    return total / count, (spread / count + eps).rsqrt()


@operator(lambda mean, var, *_: (torch.empty_like(mean), torch.empty_like(var)))
def running_statistics(
    mean: torch.Tensor, var: torch.Tensor, total: torch.Tensor, spread: torch.Tensor, count: int, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Running mean and (unbiased) variance moved to those of this batch by ``momentum``, all [c]."""
    new_mean = mean * (1 - momentum) + total / count * momentum
    new_var = var * (1 - momentum) + spread / (count - 1) * momentum
    return new_mean.to(mean.dtype), new_var.to(var.dtype)


@operator(lambda x, *_: x.new_empty(x.shape))
def normalise(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """(x - mean) rstd weight + bias of x [n, c, ...] with vectors [c]."""
    scale = rstd if weight is None else rstd * weight
    out = (to_accumulation_dtype(x) - _over(x, mean)) * _over(x, scale)
    return (out if bias is None else out + _over(x, bias)).to(x.dtype).contiguous()


@operator(lambda grad, x, mean, rstd: mean.new_empty([2, x.shape[1]]))
def batch_norm_sums(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Sums over all dims but the second of grad and of grad (x - mean) rstd -> [2, c]: the gradients of bias and weight."""
    own = to_accumulation_dtype(grad)
    scaled = (own * (to_accumulation_dtype(x) - _over(x, mean))).sum(_rest(x)) * rstd
    return torch.stack([own.sum(_rest(x)), scaled])


@operator(lambda grad, *_: grad.new_empty(grad.shape))
def batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor, rstd: torch.Tensor, sums: torch.Tensor, count: int
) -> torch.Tensor:
    """Gradient of x, with ``sums`` of the whole batch from ``batch_norm_sums``."""
    plain, scaled = (sums / count).unbind()
    normal = (to_accumulation_dtype(x) - _over(x, mean)) * _over(x, rstd * scaled)
    out = (to_accumulation_dtype(grad) - _over(x, plain) - normal) * _over(x, rstd if weight is None else rstd * weight)
    return out.to(grad.dtype).contiguous()
