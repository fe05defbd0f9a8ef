"""Where the model itself names layouts: the boundaries of a ``local_map`` region (``passes.trace.regions``), and calls of DTensor's API
(``passes.trace.dtensor_calls``). A rank passes its shard on."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.strategies.engine.factors import MOVEMENT, replicate_all
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.registry import register


def shard(ctx: LocalContext) -> Any:
    """The argument itself, made contiguous as the graph expects."""
    x = ctx.args[0]
    return x if x.meta["val"].is_contiguous() else ctx.emit(torch.ops.aten.clone.default, x, memory_format=torch.contiguous_format)


register(("fxshard.to_local.default", "fxshard.from_local.default"), replicate_all, local=shard)
register("fxshard.placed.default", pointwise_rule((0,), ops=MOVEMENT), local=shard)
