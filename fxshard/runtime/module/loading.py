"""``load_state_dict`` of a parallelized module: full tensors are sharded in the layouts of the parameters.

A hook before each module's own loading converts them to DTensors. The first hook, that of the parallelized module, checks all values
before any is loaded.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard.errors import PlanError
from fxshard.layout.layouts import Layout
from fxshard.runtime.calls.waiting import in_place_of
from fxshard.runtime.module.parameters import shard_tensor
from fxshard.runtime.ranks.compared_fields import weight_fields
from fxshard.runtime.ranks.launch import compare, mesh_ranks

_HOOKED: WeakSet[nn.Module] = WeakSet()


def accept_full_values(model: nn.Module) -> None:
    """Makes ``model.load_state_dict`` accept full tensors, equal on all ranks, besides DTensors."""
    for module in model.modules():
        if module not in _HOOKED and (module is model or any(True for _ in module.parameters(recurse=False))):
            module.register_load_state_dict_pre_hook(_shard_values)
            _HOOKED.add(module)


def _shard_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Replaces full tensors in ``state`` by DTensors in the parameters' layouts.

    Raises PlanError if ``assign=True`` and a DTensor has another layout than its parameter, RunError for full tensors that differ among
    ranks.
    """
    assign = bool(metadata.get("assign_to_params_buffers"))
    if assign:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            _check_assigned(name, parameter, state.get(prefix + name))
    forward = vars(module).get("forward")
    if getattr(forward, "waits", False) or (getattr(forward, "sharded", False) and not forward.entry):
        given = {name: state.get(prefix + name) for name, _ in module.named_parameters(remove_duplicate=False)}
        plain = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        compare(weight_fields(plain), ranks=mesh_ranks(forward.device_mesh), timeout=forward.settings.timeout)
    with torch.no_grad():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor):
                continue
            if not isinstance(value, DTensor) and value.shape == parameter.shape:
                made = shard_tensor(value, Layout(parameter.placements), parameter.device_mesh, parameter.device)
                value = state[prefix + name] = made.clone() if assign else made
            if assign and isinstance(value, DTensor):
                state[prefix + name] = in_place_of(parameter, value)


def _check_assigned(name: str, parameter: nn.Parameter, value: Any) -> None:
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        have, want = (value.device_mesh, value.placements), (parameter.device_mesh, parameter.placements)
        if have != want:
            where = f"{Layout(have[1])} on {have[0]}" if have[0] != want[0] else str(Layout(have[1]))
            what = f"load_state_dict(assign=True) has a value in {where} for parameter {name}, which is in {Layout(want[1])}"
            raise PlanError(what, where=name, remedy="load with assign=False, which moves it, or redistribute it first")
