"""Internals of process groups: the number of issued collectives, timeouts, work to wait for, and whether an error is a lost connection.

What would replace it: methods of ProcessGroup for its count of collectives, backends and timeouts, one of DeviceMesh for the active
mesh, and an error type for lost connections.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

FAKE_STORE = "torch.testing._internal.distributed.fake_pg.FakeStore()"

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def issued(group: ProcessGroup) -> int:
    """The number of collectives that this rank has issued on ``group``; 0 where the backend does not count."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0


def devices_of(group: ProcessGroup) -> list[torch.device]:
    """The device types for which ``group`` has a backend."""
    return list(group._device_types)


def backend_of(group: ProcessGroup, device: torch.device) -> tuple[Any, timedelta]:
    """The backend for ``device``'s tensors and its timeout, which the backend's ``set_timeout(timedelta)`` changes."""
    backend = group._get_backend(torch.device(device.type))
    return backend, backend.options._timeout


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """The name of the backend for ``device``'s tensors: ``"gloo"``, ``"nccl"``, ..."""
    return group._get_backend(torch.device(device.type)).name()


def active_mesh() -> DeviceMesh | None:
    """The mesh of the innermost active ``with device_mesh:`` of this thread."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank or the network, not because of its arguments.

    gloo has no error type for that; its messages contain the path of its source file.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistBackendError | dist.DistNetworkError) or (isinstance(seen, RuntimeError) and "/gloo/" in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def register_group_alias(name: str, group: ProcessGroup) -> None:
    """Lets functional collectives find ``group`` under ``name`` as well."""
    from torch._C._distributed_c10d import _register_process_group

    _register_process_group(name, group)


def unregister_group(name: str) -> None:
    """Frees a name of ``register_group_alias`` whose group is gone."""
    from torch._C._distributed_c10d import _unregister_process_group

    _unregister_process_group(name)


def rank_and_size(name: str) -> tuple[int, int]:
    """(this process's rank in the group called ``name``, its number of ranks)."""
    from torch._C._distributed_c10d import _resolve_process_group

    group = _resolve_process_group(name)
    return group.rank(), group.size()


def start_exchange(received: torch.Tensor, sent: torch.Tensor, counts: tuple[list[int], list[int]], name: str) -> torch.Tensor:
    """Starts an all-to-all in a group into the front of ``received``; ``wait_tensor(received)`` waits for it.

    ``counts``: rows received from each rank of the group, rows of ``sent`` for each.
    """
    from torch._C._distributed_c10d import _register_work, _resolve_process_group

    taken, given = counts
    front = received[: sum(taken)]
    group: Any = _resolve_process_group(name)
    work = dist.all_to_all_single(front, sent[: sum(given)].contiguous(), taken, given, group=group, async_op=True)
    _register_work(received, work)
    return received
