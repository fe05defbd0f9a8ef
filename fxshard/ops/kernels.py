"""The kernels of fxshard's device-independent operators, by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxshard.ops import attention, contraction, random
from fxshard.ops.norms import cross_entropy, normalization, row_norm, softmax

Kernel = Callable[..., Any]

KERNELS: dict[Any, Kernel] = {
    torch.ops.aten.masked_select.default: lambda x, mask: torch.ops.aten.masked_select(*torch.broadcast_tensors(x, mask)),
    torch.ops.fxshard.einsum.default: contraction.einsum_kernel,
    torch.ops.fxshard.sdpa.default: lambda *args: tuple(t.contiguous() for t in attention.forward_kernel(*args)),
    torch.ops.fxshard.sdpa_backward.default: lambda *args: tuple(t.contiguous() for t in attention.backward_kernel(*args)),
    torch.ops.fxshard.dropout_shard.default: random.dropout_shard_kernel,
    torch.ops.fxshard.dropout_backward.default: random.mask_and_scale,
    torch.ops.fxshard.sum_exp.default: softmax.sum_exp_kernel,
    torch.ops.fxshard.softmax.default: softmax.softmax_kernel,
    torch.ops.fxshard.sum_product.default: softmax.sum_product_kernel,
    torch.ops.fxshard.softmax_backward.default: softmax.softmax_backward_kernel,
    torch.ops.fxshard.target_score.default: cross_entropy.target_score_kernel,
    torch.ops.fxshard.score_sum.default: cross_entropy.score_sum_kernel,
    torch.ops.fxshard.cross_entropy.default: cross_entropy.cross_entropy_kernel,
    torch.ops.fxshard.cross_entropy_backward.default: cross_entropy.cross_entropy_backward_kernel,
    torch.ops.fxshard.spread_target.default: cross_entropy.spread_target_kernel,
    torch.ops.fxshard.channel_sum.default: normalization.sum_kernel,
    torch.ops.fxshard.channel_spread.default: normalization.spread_kernel,
    torch.ops.fxshard.batch_statistics.default: normalization.statistics_kernel,
    torch.ops.fxshard.running_statistics.default: normalization.running_kernel,
    torch.ops.fxshard.normalise.default: normalization.normalise_kernel,
    torch.ops.fxshard.batch_norm_sums.default: normalization.backward_sums_kernel,
    torch.ops.fxshard.batch_norm_backward.default: normalization.backward_kernel,
    torch.ops.fxshard.row_sum.default: row_norm.sum_kernel,
    torch.ops.fxshard.row_mean.default: row_norm.mean_kernel,
    torch.ops.fxshard.row_spread.default: row_norm.spread_kernel,
    torch.ops.fxshard.row_rstd.default: row_norm.rstd_kernel,
    torch.ops.fxshard.row_normalise.default: row_norm.normalise_kernel,
    torch.ops.fxshard.row_norm_sums.default: row_norm.backward_sums_kernel,
    torch.ops.fxshard.row_norm_backward.default: row_norm.backward_kernel,
    torch.ops.fxshard.row_norm_weight.default: row_norm.weight_kernel,
}
"""Operator -> its implementation by operators of the device."""
