"""Private names of DTensor (2.13): their local tensors, without autograd and without asking DTensor; operators of one's own on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local_like(value: Any, like: DTensor) -> torch.Tensor | None:
    """The shard of ``value`` on this rank; None unless it is a plain tensor of a DTensor that lies as ``like`` does."""
    if not isinstance(value, DTensor) or type(value._local_tensor) is not torch.Tensor:
        return None
    a, b = value._spec, like._spec
    same = a is b or (a.placements == b.placements and a.shape == b.shape and a.mesh == b.mesh)
    return value._local_tensor if same else None


def spec_of(value: DTensor) -> Any:
    """What says how ``value`` lies: compared by identity, it tells whether it lies as before."""
    return value._spec


OVERFLOW_CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""The operator by which gradient scalers divide gradients and look for entries that are not finite."""

IS_ANY_TRUE = torch.ops.aten._is_any_true.default
"""The operator by which anomaly mode looks for NaN in a gradient."""


def handle_dtensors(op: Any, handler: Callable[[Any, Sequence[Any], Any], Any]) -> None:
    """From now on ``op`` on DTensors is ``handler(op, args, kwargs)``, as torch's own ``loss_parallel`` does it for its operators."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def spec_or_none(value: torch.Tensor) -> Any:
    """As ``spec_of``; None for what is no DTensor."""
    return getattr(value, "_spec", None)
