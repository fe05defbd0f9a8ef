"""Decompositions applied while tracing: forms in which every sharding is exact (a mean is a sum, then one division)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

aten = torch.ops.aten
MEAN, SUM = 1, 2


@lru_cache(maxsize=1)
def planning_decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator overload -> its planning form."""
    return {
        aten.mean.default: _mean,
        aten.mean.dim: _mean_dim,
        aten.nll_loss_forward.default: _nll_loss_forward,
        aten.nll_loss_backward.default: _nll_loss_backward,
    }


def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return aten.sum.default(x, dtype=dtype) / x.numel()


def _mean_dim(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    dims = list(dim) if dim else list(range(x.dim()))
    return aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


def _nll_loss_forward(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int) -> Any:
    """mean = sum of the weighted losses / sum of the weights; both are sums over the batch."""
    if reduction != MEAN:
        return NotImplemented
    total, weights = aten.nll_loss_forward.default(x, target, weight, SUM, ignore_index)
    return total / weights, weights


def _nll_loss_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> Any:
    if reduction != MEAN:
        return NotImplemented
    return aten.nll_loss_backward.default(grad / total_weight, x, target, weight, SUM, ignore_index, total_weight)
