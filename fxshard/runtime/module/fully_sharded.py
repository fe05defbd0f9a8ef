"""Modules of torch's FSDP2: ``parallelize`` takes ``fully_shard`` off and keeps the parameters as they are."""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat.fully_shard import is_fully_sharded, more_than_layouts, sharded_parameters, take_off
from fxshard.errors import OptionError, count_text
from fxshard.mesh.mesh import as_mesh
from fxshard.runtime.ranks.launch import announce

TAKEN_OFF = (
    "torch's fully_shard was taken off %s: the plan gathers parameters and reduces gradients. Plain arguments are now whole tensors, "
    "equal on all ranks, and the loss is that of the whole batch; pass a rank's own rows with fxshard.local_batch"
)


def take_off_fully_shard(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Undoes ``fully_shard`` on ``model`` and its submodules. Their parameters, and what optimisers hold, stay the same DTensors.

    Raises OptionError, before anything changes, for another mesh, and if ``fully_shard`` was asked for more than layouts of parameters.
    """
    found = {name or "the model": module for name, module in model.named_modules() if is_fully_sharded(module)}
    for name, module in found.items():
        _check_mesh(name, module, device_mesh)
        for what, remedy in more_than_layouts(module):
            raise OptionError(f"fully_shard of {name} has {what}, which no plan takes over", where=name, remedy=remedy)
    for module in found.values():
        take_off(module)
    if found:
        announce(device_mesh, logging.WARNING, TAKEN_OFF, count_text(len(found), "module"))


def _check_mesh(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
    known = as_mesh(device_mesh).axis_names
    axes = {axis for parameter in sharded_parameters(module) for axis in as_mesh(parameter.device_mesh).axis_names}
    if not axes <= set(known):
        what = f"fully_shard of {name} is on a mesh of {', '.join(sorted(axes))}, parallelize on one of {', '.join(known)}"
        raise OptionError(what, where=name, remedy="pass both the same mesh, or parallelize one that has its axes, by name")
