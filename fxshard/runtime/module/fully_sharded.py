"""Modules of torch's FSDP2: ``parallelize`` takes ``fully_shard`` off and keeps the parameters as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat.fully_shard import (
    is_fully_sharded,
    lay_out_anew,
    more_than_layouts,
    sharded_from_outside,
    sharded_parameters,
    split_by_two_axes,
    take_off,
)
from fxshard.errors import OptionError, count_text
from fxshard.mesh.mesh import as_mesh
from fxshard.runtime.ranks.launch import announce, ends_together, mesh_ranks

TAKEN_OFF = (
    "torch's fully_shard was taken off %s: the plan gathers parameters and reduces gradients. Plain arguments are now whole tensors, "
    "equal on all ranks, and the loss is that of the whole batch; pass a rank's own rows with fxshard.local_batch"
)

LAID_OUT_ANEW = "fully_shard and tensor parallelism sharded one dim of %s; fully_shard's axis shards another now, where there is one"


@contextmanager
def without_fully_shard(model: nn.Module, device_mesh: DeviceMesh, timeout: float) -> Iterator[None]:
    """Undoes ``fully_shard`` on ``model`` and its submodules, for good if the block succeeds; if it raises, all is put back.
    Parameters, and what optimisers hold, stay the same DTensors; of those that tensor parallelism shards along the same dim, another dim
    is sharded (``lay_out_anew``).

    ``timeout``: seconds to wait for other ranks. Raises OptionError, before anything changes, for another mesh, and if ``fully_shard`` was
    asked for what no plan takes over; RunError, with that reason, on ranks that have none of their own.
    """
    found = {name or "the model": module for name, module in model.named_modules() if is_fully_sharded(module)}
    others = sharded_from_outside(model)
    if not found and not others:
        yield
        return
    with ends_together("take fully_shard off", ranks=mesh_ranks(device_mesh), timeout=timeout):
        for name in others:
            what = f"the parameters of {name or 'the model'} belong to a fully_shard of modules that are not all given"
            remedy = "parallelize the module that holds all of them, or call fully_shard on this one alone first"
            raise OptionError(what, where=name, remedy=remedy)
        for name, module in found.items():
            _check_mesh(name, module, device_mesh)
            for what, remedy in more_than_layouts(module):
                raise OptionError(f"fully_shard of {name} has {what}, which no plan takes over", where=name, remedy=remedy)
    split = [parameter for module in found.values() for parameter in split_by_two_axes(module)]
    undo = [take_off(module) for module in found.values()]
    try:
        for parameter in split:
            undo.append(lay_out_anew(parameter))
        yield
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
    announce(device_mesh, logging.WARNING, TAKEN_OFF, count_text(len(found), "module"))
    if split:
        announce(device_mesh, logging.WARNING, LAID_OUT_ANEW, count_text(len(split), "parameter"))


def fully_sharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The parameters that ``fully_shard`` shards, also while their modules hold whole ones."""
    return [p for module in model.modules() if is_fully_sharded(module) for p in sharded_parameters(module)]


def _check_mesh(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
    for own in {parameter.device_mesh for parameter in sharded_parameters(module)}:
        if not _is_part(own, device_mesh):
            what = f"fully_shard of {name} is on {own}, which is no part of {device_mesh}"
            raise OptionError(what, where=name, remedy="give parallelize the same mesh, or one of which it is a part, by names of axes")


def _is_part(part: DeviceMesh, device_mesh: DeviceMesh) -> bool:
    """Whether ``part`` has axes of ``device_mesh``, in their order and with the same ranks, on the same kind of device."""
    axes, known = as_mesh(part).axis_names, as_mesh(device_mesh).axis_names
    if axes != tuple(axis for axis in known if axis in axes) or part.device_type != device_mesh.device_type:
        return False
    return torch.equal(part.mesh, device_mesh.mesh if axes == known else device_mesh[axes].mesh)
