"""The mesh of a call without the option ``mesh``: that of its DTensors, else the ambient one, else the default process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.groups import active_mesh, devices_of
from fxshard.errors import OptionError, PlanError

WORLD = "world"
"""The name of the only axis of the mesh of the default process group."""


def mesh_of_dtensors(names: Sequence[str], values: Sequence[Any]) -> DeviceMesh | None:
    """The mesh of the DTensors among ``values``, None if there are none; raises PlanError for two meshes."""
    first: tuple[str, DeviceMesh] | None = None
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, DTensor):
            continue
        if first is None:
            first = name, value.device_mesh
        elif value.device_mesh != first[1]:
            what = f"{first[0]} is a DTensor on {first[1]}, {name} is one on {value.device_mesh}"
            raise PlanError(
                what, remedy="use one mesh for all: DTensors on the whole mesh, replicated over the axes that do not matter to them"
            )
    return None if first is None else first[1]


def mesh_context() -> tuple[DeviceMesh | None, Any]:
    """(the mesh of ``with device_mesh:`` in this thread, the default process group), on which ``ambient_mesh`` depends."""
    return active_mesh(), dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def ambient_mesh(values: Sequence[Any]) -> DeviceMesh:
    """The mesh of ``with device_mesh:``, else the default process group as one axis; raises OptionError if there is neither.

    The mesh of a group has the device type of the tensors among ``values`` if the group has a backend for it, else of its first backend.
    """
    mesh, group = mesh_context()
    if mesh is not None:
        return mesh
    if group is None:
        raise OptionError(
            "the backend fxshard has no mesh: no option 'mesh', no DTensor in the graph, no `with device_mesh:` around the call, "
            "and no default process group",
            remedy="pass options={'mesh': device_mesh}, with device_mesh = "
            "torch.distributed.device_mesh.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',)); or start a process group",
        )
    kinds = [device.type for device in devices_of(group)]
    used = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    kind = next((kind for kind in kinds if kind in used), kinds[0])
    return DeviceMesh.from_group(group, kind, mesh_dim_names=(WORLD,))
