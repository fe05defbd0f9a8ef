"""Modules of torch's FSDP2: ``parallelize`` takes ``fully_shard`` off and keeps the parameters as they are; planning sets it aside."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.fully_shard import (
    is_fully_sharded,
    lay_out_anew,
    more_than_layouts,
    placements_anew,
    sharded_from_outside,
    sharded_parameters,
    split_by_two_axes,
    take_off,
)
from fxshard.errors import OptionError, count_text
from fxshard.mesh.mesh import Mesh, as_mesh
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
    found = _found(model)
    if not found and not sharded_from_outside(model):
        yield
        return
    with ends_together("take fully_shard off", ranks=mesh_ranks(device_mesh), timeout=timeout):
        _check(model, found, device_mesh)
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


@contextmanager
def fully_shard_set_aside(model: nn.Module, mesh: Mesh | DeviceMesh) -> Iterator[dict[int, tuple[Placement, ...]]]:
    """Undoes ``fully_shard`` on ``model`` while the block runs, so that it can be traced; nothing is sent, and no parameter moves.

    Yields the placements to which ``without_fully_shard`` would move parameters, by their ids. Raises OptionError as that does.
    """
    found = _found(model)
    _check(model, found, mesh)
    moved = {id(p): placements_anew(p) for module in found.values() for p in split_by_two_axes(module)}
    with ExitStack() as put_back:
        for module in found.values():
            put_back.callback(take_off(module))
        yield moved


def fully_sharded_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The parameters that ``fully_shard`` shards, also while their modules hold whole ones."""
    return [p for module in model.modules() if is_fully_sharded(module) for p in sharded_parameters(module)]


def _found(model: nn.Module) -> dict[str, nn.Module]:
    return {name or "the model": module for name, module in model.named_modules() if is_fully_sharded(module)}


def _check(model: nn.Module, found: Mapping[str, nn.Module], mesh: Mesh | DeviceMesh) -> None:
    for name in sharded_from_outside(model):
        what = f"the parameters of {name or 'the model'} belong to a fully_shard of modules that are not all given"
        remedy = "give the module that holds all of them, or call fully_shard on this one alone first"
        raise OptionError(what, where=name, remedy=remedy)
    for name, module in found.items():
        for own in {parameter.device_mesh for parameter in sharded_parameters(module)}:
            check_part(own, mesh, name, f"fully_shard of {name}")
        for what, remedy in more_than_layouts(module):
            raise OptionError(f"fully_shard of {name} has {what}, which no plan takes over", where=name, remedy=remedy)


def check_part(own: DeviceMesh, mesh: Mesh | DeviceMesh, where: str, what: str | None = None) -> None:
    """Raises OptionError unless ``own``, the mesh of ``what`` (by default of ``where``), is a part of ``mesh``."""
    if not _is_part(own, mesh):
        named = "give the same mesh, or one of which it is a part, by names of axes"
        remedy = named if own.mesh_dim_names else "make its mesh with names of axes: init_device_mesh(..., mesh_dim_names=(...))"
        raise OptionError(f"{what or where} is on {own}, which is no part of {mesh}", where=where, remedy=remedy)


def _is_part(part: DeviceMesh, mesh: Mesh | DeviceMesh) -> bool:
    """Whether ``part`` has axes of ``mesh``, in their order; with the same ranks and on the same kind of device if ``mesh`` has ranks, else
    of the same sizes."""
    mine, whole = as_mesh(part), as_mesh(mesh)
    if mine.axis_names != tuple(axis for axis in whole.axis_names if axis in mine.axis_names):
        return False
    if isinstance(mesh, Mesh):
        return all(mine.shape[mine.axis(axis)] == whole.shape[whole.axis(axis)] for axis in mine.axis_names)
    of_mesh = mesh if mine.axis_names == whole.axis_names else mesh[mine.axis_names]
    return part.device_type == mesh.device_type and torch.equal(part.mesh, of_mesh.mesh)
