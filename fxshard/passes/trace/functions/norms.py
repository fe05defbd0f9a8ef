"""Normalisations while tracing: their statistics are sums, which become pending sums if a normalised dim is sharded.

A call whose normalised dims hold at most one element, or whose tensor is empty, is left to torch. For half precision, statistics stay in
float32 for the gradients: rounded ones cause errors of 2 % in weight gradients if the mean is ten standard deviations. A model that reads
them itself gets the dtype of torch's CPU kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from fxshard._torch_compat.sizes.symbols import is_unknown

aten = torch.ops.aten


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    """In training the statistics are sums over the whole batch, which become pending sums if the batch is sharded."""
    if not training:
        return NotImplemented
    own, count = torch.ops.fxshard, x.numel() // x.shape[1]
    total = own.channel_sum(x)
    spread = own.channel_spread(x, total, count)
    batch_mean, rstd = own.batch_statistics(total, spread, count, eps)
    running = () if mean is None else own.running_statistics(mean, var, total, spread, count, momentum)
    return own.normalise(x, batch_mean, rstd, weight, bias), batch_mean, rstd, *running


def _batch_norm_backward(
    grad: Any, x: Any, weight: Any, mean: Any, var: Any, save_mean: Any, rstd: Any, training: bool, eps: float, mask: Sequence[bool]
) -> Any:
    """Gradients of weight and bias are sums over the batch, and the gradient of x needs the same sums."""
    if not training:
        return NotImplemented
    own, count = torch.ops.fxshard, x.numel() // x.shape[1]
    sums = own.batch_norm_sums(grad, x, save_mean, rstd)
    to_x = own.batch_norm_backward(grad, x, weight, save_mean, rstd, sums, count) if mask[0] else None
    to_bias, to_weight = (sums[i].to(x.dtype if weight is None else weight.dtype) if mask[2 - i] else None for i in (0, 1))
    return to_x, to_weight, to_bias


def _layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    dims = _last(x, len(shape))
    if _nothing_to_cut(x, _count(x, dims)):
        return NotImplemented
    return _normalised(x, weight, bias, dims, eps)


def _layer_norm_backward(
    grad: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> Any:
    dims = _last(x, len(shape))
    if _nothing_to_cut(x, _count(x, dims)):
        return NotImplemented
    return _gradients(grad, x, mean, rstd, weight, bias, dims, mask)


def _group_norm(x: Any, weight: Any, bias: Any, batch: int, channels: int, space: int, groups: int, eps: float) -> Any:
    if _nothing_to_cut(x, channels * space // groups):
        return NotImplemented
    rows = _grouped(x, groups)
    dims = list(range(2, rows.dim()))
    out, mean, rstd = _normalised(rows, _over_groups(weight, x, groups), _over_groups(bias, x, groups), dims, eps)
    return out.view(x.shape), mean.view(batch, groups), rstd.view(batch, groups)


def _group_norm_backward(
    grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, batch: int, channels: int, space: int, groups: int, mask: Sequence[bool]
) -> Any:
    if _nothing_to_cut(x, channels * space // groups):
        return NotImplemented
    rows = _grouped(x, groups)
    mean, rstd = (v.view(batch, groups, *[1] * (rows.dim() - 2)) for v in (mean, rstd))
    dims, others = list(range(2, rows.dim())), (0, *range(3, rows.dim()))
    vector = _over_groups(weight, x, groups)
    to_x, *to_vectors = _gradients(_grouped(grad, groups), rows, mean, rstd, vector, vector, dims, mask, others)
    dtype = x.dtype if weight is None else weight.dtype
    return None if to_x is None else to_x.view(x.shape), *(None if v is None else v.view(channels).to(dtype) for v in to_vectors)


def _normalised(x: Any, weight: Any, bias: Any, dims: list[int], eps: float) -> tuple[Any, Any, Any]:
    """(out, mean, rstd) of ``x`` normalised over ``dims``; weight and bias align with its last dims."""
    own, count = torch.ops.fxshard, _count(x, dims)
    total = own.row_sum(x, dims)
    rstd = own.row_rstd(own.row_spread(x, total, count, dims), count, eps)
    mean = own.row_mean(total, count)
    return own.row_normalise(x, mean, rstd, weight, bias), mean, rstd


def _gradients(
    grad: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    dims: list[int],
    mask: Sequence[bool],
    others: Sequence[int] | None = None,
) -> tuple[Any, Any, Any]:
    """Gradients of (x, weight, bias), None where ``mask`` is False. Those of weight and bias are summed over ``others``, by default all
    dims that are not normalised."""
    own = torch.ops.fxshard
    over = list(others) if others is not None else [d for d in range(x.dim()) if d not in dims]
    to_x = to_weight = to_bias = None
    if mask[0]:
        sums = own.row_norm_sums(grad, x, mean, rstd, weight, dims)
        to_x = own.row_norm_backward(grad, x, mean, rstd, weight, sums, _count(x, dims))
    if mask[1]:
        to_weight = own.row_norm_weight(grad, x, mean, rstd, over, not mask[0]).to(x.dtype if weight is None else weight.dtype)
    if mask[2]:
        to_bias = own.row_norm_weight(grad, None, None, None, over, not any(mask[:2])).to(x.dtype if bias is None else bias.dtype)
    return to_x, to_weight, to_bias


def _nothing_to_cut(x: Any, count: Any) -> bool:
    """Whether to leave the call to torch: no row (``count`` elements) can be sharded, or a size is known only at run time."""
    return any(map(is_unknown, x.shape)) or count <= 1 or not x.numel()


def _last(x: Any, count: int) -> list[int]:
    return list(range(x.dim() - count, x.dim()))


def _count(x: Any, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _grouped(x: Any, groups: int) -> Any:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _over_groups(vector: Any, x: Any, groups: int) -> Any:
    return None if vector is None else vector.view(groups, -1, *[1] * (x.dim() - 2))


NORMS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *how: _batch_norm(x, weight, bias, None, None, *how),
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
"""Operator -> its replacement."""


def _own_statistics(norm: Callable[..., Any]) -> Callable[..., Any]:
    """``norm`` for calls by the model itself: mean and rstd get the dtype that torch's CPU kernel returns, the promoted dtype of x,
    weight and bias."""

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        out, mean, rstd, *running = norm(*args, **kwargs)
        given = [v.dtype for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        dtype = reduce(torch.promote_types, given)
        return out, mean.to(dtype), rstd.to(dtype), *running

    return call


_FUNCTIONS = (torch.native_layer_norm, torch.native_group_norm, torch.native_batch_norm)
_PACKETS = (
    aten.native_layer_norm,
    aten.native_group_norm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
)
_OVERLOADS = tuple(getattr(packet, name) for packet in _PACKETS for name in packet.overloads() if "out" not in name)
STATISTICS: dict[Any, Callable[..., Any]] = {norm: _own_statistics(norm) for norm in (*_FUNCTIONS, *_PACKETS, *_OVERLOADS)}
"""Functions that return statistics to the model -> their replacements."""
