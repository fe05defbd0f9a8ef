"""Process groups from the inside: how many collectives were issued, how long one may wait, whether an error is a lost connection."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def issued(group: ProcessGroup) -> int:
    """How many collectives this rank has issued on ``group``; 0 where the backend does not count."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0


def devices_of(group: ProcessGroup) -> list[torch.device]:
    """The kinds of device that ``group`` has a backend for."""
    return list(group._device_types)


def backend_of(group: ProcessGroup, device: torch.device) -> tuple[Any, timedelta]:
    """What runs collectives of ``device``'s tensors, and how long one may wait; ``.set_timeout(timedelta)`` changes that."""
    backend = group._get_backend(torch.device(device.type))
    return backend, backend.options._timeout


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """``"gloo"``, ``"nccl"``, ...: what runs collectives of ``device``'s tensors."""
    return group._get_backend(torch.device(device.type)).name()


def active_mesh() -> DeviceMesh | None:
    """The innermost mesh whose ``with device_mesh:`` this thread is in."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, or of the network, and not of what it was given.

    gloo has no kind of its own for that: its errors name its source file.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistBackendError | dist.DistNetworkError) or (isinstance(seen, RuntimeError) and "/gloo/" in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
