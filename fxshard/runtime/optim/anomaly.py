"""``torch.autograd.detect_anomaly`` on DTensors: a NaN in one rank's shard is found on all ranks.

Anomaly mode tests each gradient for NaN with an operator for which torch 2.13's DTensor has no rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.dtensor.shards import IS_ANY_TRUE, handle_dtensors
from fxshard.runtime.optim.grad_scaler import agree_on


@functools.cache
def agree_on_anomalies() -> None:
    """Makes anomaly mode support gradients that are DTensors, in this process from now on."""
    handle_dtensors(IS_ANY_TRUE, _is_any_true)


def _is_any_true(op: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor:
    (value,) = args
    assert isinstance(value, DTensor)
    found = value.to_local().any().to(torch.float32)
    agree_on(found, [value], "NaN")
    return found > 0
