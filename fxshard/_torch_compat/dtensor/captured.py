"""Private names of torch 2.13: what Dynamo's capture of DTensors hides.

What would replace them: ``DTensor.device_mesh`` that is a DeviceMesh in a capture too, and a query whether ``loss_parallel`` is on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def captured_mesh(value: DTensor) -> DeviceMesh:
    """The mesh of a DTensor among Dynamo's example values, where an opaque object stands for it."""
    mesh: Any = value.device_mesh
    real: DeviceMesh = getattr(mesh, "real_obj", mesh)  # the object claims to be a DeviceMesh
    return real


def loss_parallel_is_on() -> bool:
    """Whether this runs within ``torch.distributed.tensor.parallel.loss_parallel()``."""
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers
