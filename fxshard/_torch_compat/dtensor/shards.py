"""Private names of DTensor (2.13): local tensors without autograd and dispatch, custom handlers of operators, and parameters.

What would replace it: ``DTensor.to_local`` without autograd, and a registration of handlers of operators beside ``register_sharding``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.tensor import DTensor


def local_like(value: Any, like: DTensor) -> torch.Tensor | None:
    """The local tensor of ``value``; None unless ``value`` is a DTensor with a plain local tensor and the same layout as ``like``."""
    if not isinstance(value, DTensor) or type(value._local_tensor) is not torch.Tensor:
        return None
    a, b = value._spec, like._spec
    same = a is b or (a.placements == b.placements and a.shape == b.shape and a.mesh == b.mesh)
    return value._local_tensor if same else None


def spec_of(value: DTensor) -> Any:
    """The spec (layout) of ``value``; comparing it by identity tells whether the layout is unchanged."""
    return value._spec


OVERFLOW_CHECK = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""The operator with which gradient scalers divide gradients and detect entries that are not finite."""

IS_ANY_TRUE = torch.ops.aten._is_any_true.default
"""The operator with which anomaly mode detects NaN in a gradient."""


def handle_dtensors(op: Any, handler: Callable[[Any, Sequence[Any], Any], Any]) -> None:
    """From now on ``op`` on DTensors calls ``handler(op, args, kwargs)``; torch's ``loss_parallel`` registers its operators likewise."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


def handler_of(op: Any) -> Callable[[Any, Sequence[Any], Any], Any] | None:
    """The handler that ``op`` on DTensors calls; None for an operator without one."""
    return DTensor._op_dispatcher._custom_op_handlers.get(op)


def is_captured(value: DTensor) -> bool:
    """Whether ``value`` stands for a DTensor while a graph is captured: its local tensor is a fake."""
    return isinstance(value._local_tensor, FakeTensor)


def spec_or_none(value: torch.Tensor) -> Any:
    """As ``spec_of``; None for a tensor that is not a DTensor."""
    return getattr(value, "_spec", None)


def become_parameter(value: DTensor, requires_grad: bool) -> nn.Parameter:
    """``value``, which nobody else holds and which has no history, as a parameter: what ``nn.Parameter`` does, but for the detached copy.
    Detaching a DTensor of a new shape takes DTensor about 4 ms, in which it finds the placements of the result."""
    parameter: Any = value.requires_grad_(requires_grad)
    parameter._is_param = True
    return parameter
