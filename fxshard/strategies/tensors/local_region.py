"""The ends of a ``local_map`` region: on a rank the shard is the value. Their placements are the user's (``passes.regions``)."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.strategies.engine.factors import replicate_all
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.registry import register


def shard(ctx: LocalContext) -> Any:
    """The argument itself, in the strides that the graph counts on."""
    x = ctx.args[0]
    return x if x.meta["val"].is_contiguous() else ctx.emit(torch.ops.aten.clone.default, x, memory_format=torch.contiguous_format)


register(("fxshard.to_local.default", "fxshard.from_local.default"), replicate_all, local=shard)
