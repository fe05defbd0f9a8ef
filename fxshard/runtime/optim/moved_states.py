"""What optimisers keep of earlier steps follows parameters that ``parallelize`` has moved to another layout or mesh.

torch combines DTensors of one mesh in whatever layouts they are, at the price of a redistribution in each step, but not of two meshes, and
``fused`` optimisers take the local pieces as they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxshard._torch_compat.loaded_state import shard_loaded_state

_moved = WeakIdKeyDictionary()
"""The parameters that were moved, as keys."""


@contextmanager
def states_follow(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """After the block, each optimiser that steps brings its states of those DTensors that the block has moved to their layouts, also states
    that it loads later. All ranks must step such an optimiser: moving communicates. If the block raises, nothing follows. Whole states,
    equal on all ranks, are sharded like their DTensors when an optimiser loads them.
    """
    shard_loaded_state(_as_parameter)
    before = [(p, p.device_mesh, p.placements) for p in parameters if isinstance(p, DTensor)]
    yield
    for parameter, mesh, placements in before:
        if (parameter.device_mesh, parameter.placements) != (mesh, placements):
            _moved[parameter] = True
            _watch_steps()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in [p for group in optimizer.param_groups for p in group["params"] if p in _moved]:
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, DTensor) and value.shape == parameter.shape:
                state[name] = _like(value, parameter)


def _as_parameter(parameter: torch.Tensor, value: Any) -> Any:
    """A loaded state: a whole tensor of a DTensor's shape in the DTensor's layout."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape or not value.dim():
        return value
    return _distributed(value, parameter)


def _distributed(value: torch.Tensor, parameter: DTensor) -> DTensor:
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


@torch.no_grad()
def _like(value: DTensor, parameter: DTensor) -> DTensor:
    if value.device_mesh != parameter.device_mesh:
        return _distributed(value.full_tensor(), parameter)
    return value if value.placements == parameter.placements else value.redistribute(placements=parameter.placements)
