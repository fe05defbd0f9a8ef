"""Private names of torch's optimisers (2.13): where ``load_state_dict`` puts the state of a parameter.

torch moves it to the parameter's device. What would replace it: a public hook for one value of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

DeviceOf = Callable[[Tensor, Any], torch.device | None]


@functools.cache
def place_loaded_state(device_of: DeviceOf) -> None:
    """From now on the state ``name`` of a parameter is loaded to ``device_of(parameter, name)``; None: where torch puts it."""
    owner: Any = optim.Optimizer
    by_torch = owner._process_value_according_to_param_policy

    def placed(param: Tensor, value: Tensor, param_id: int, param_groups: Any, key: Any = None) -> Tensor:
        device = device_of(param, key)
        if device is None:
            found: Tensor = by_torch(param, value, param_id, param_groups, key)
            return found
        return value.to(device=device, dtype=param.dtype if param.is_floating_point() else value.dtype)

    owner._process_value_according_to_param_policy = staticmethod(placed)


@functools.cache
def shard_loaded_state(shard: Callable[[Tensor, Tensor], Tensor]) -> None:
    """From now on what an optimiser loads for a parameter is ``shard(parameter, value)`` of what it would load."""
    owner: Any = optim.Optimizer
    before = owner._process_value_according_to_param_policy

    def sharded(param: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return shard(param, before(param, value, *args, **kwargs))

    owner._process_value_according_to_param_policy = staticmethod(sharded)
