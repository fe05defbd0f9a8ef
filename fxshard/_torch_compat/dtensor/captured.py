"""Private names of torch 2.13: the DeviceMesh behind a DTensor that Dynamo captures.

What would replace it: ``DTensor.device_mesh`` that is a DeviceMesh in a capture too.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def captured_mesh(value: DTensor) -> DeviceMesh:
    """The mesh of a DTensor among Dynamo's example values, where an opaque object stands for it."""
    mesh: Any = value.device_mesh
    real: DeviceMesh = getattr(mesh, "real_obj", mesh)  # the object claims to be a DeviceMesh
    return real
