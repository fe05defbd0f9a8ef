"""``fxshard::to_local`` and ``fxshard::from_local``: the boundaries of a ``local_map`` region.

Inside the region, the graph has the shapes of one rank. ``layout`` and ``gradient`` are the layouts of a value and of its gradient on
the region's mesh ``axes`` (``"dp=2,tp=4"``). Lowering removes both operators, since a lowered value is its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.library.custom_op("fxshard::to_local", mutates_args=())
def to_local(x: torch.Tensor, shape: Sequence[int], layout: str, gradient: str, axes: str) -> torch.Tensor:
    """This rank's shard, of ``shape``, of a global tensor in ``layout``."""
    raise RuntimeError("to_local stands for a shard; it is lowered before anything runs")


@torch.library.custom_op("fxshard::from_local", mutates_args=())
def from_local(x: torch.Tensor, shape: Sequence[int], layout: str, gradient: str, axes: str) -> torch.Tensor:
    """The global tensor, of ``shape``, from the ranks' shards ``x`` in ``layout``."""
    raise RuntimeError("from_local stands for a global tensor; it is lowered before anything runs")


def _fake(x: torch.Tensor, shape: Sequence[int], layout: str, gradient: str, axes: str) -> torch.Tensor:
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, layout, gradient, axes = inputs
    ctx.back = list(x.shape), gradient, layout, axes


to_local.register_fake(_fake)
from_local.register_fake(_fake)
to_local.register_autograd(lambda ctx, grad: (from_local(grad, *ctx.back), None, None, None, None), setup_context=_setup)
from_local.register_autograd(lambda ctx, grad: (to_local(grad, *ctx.back), None, None, None, None), setup_context=_setup)
