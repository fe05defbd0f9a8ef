"""``torch.autograd.detect_anomaly`` on DTensors: all ranks find what one of them finds in its shard.

Anomaly mode asks of each gradient whether an entry is NaN, by an operator for which DTensor of torch 2.13 has no rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.shards import IS_ANY_TRUE, handle_dtensors
from fxshard.runtime.optim.grad_scaler import parted
from fxshard.runtime.ranks.watchdog import watching


@functools.cache
def agree_on_anomalies() -> None:
    """From now on, in this process, anomaly mode looks into gradients that are DTensors."""
    handle_dtensors(IS_ANY_TRUE, _is_any_true)


def _is_any_true(op: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor:
    (value,) = args
    assert isinstance(value, DTensor)
    found = value.to_local().any().to(torch.float32)
    for mesh, axis in parted([value]):
        group = mesh.get_group(axis)
        with watching("tell each other whether a gradient is NaN", group):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found > 0
