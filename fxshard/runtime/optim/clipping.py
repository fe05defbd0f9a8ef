"""Clips gradients by their global norm, for gradients in any layouts, with one small collective per mesh axis.

``torch.nn.utils.clip_grad_norm_`` takes DTensors as well, and gives the same for norms of order two. With ``norm_type=inf`` torch 2.13
raises on a rank whose shard is empty, while the others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from fxshard.errors import OptionError, RunError, a_kind
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.runtime.ranks.watchdog import watching


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    timeout: float = TIMEOUT,
) -> torch.Tensor:
    """Scales all gradients in place by ``max_norm`` over their joint norm if that is larger; returns the norm, a plain scalar.

    The norm is that of all gradients as one vector, as on one device, in any layouts: uneven and empty shards, several meshes, DTensors
    beside plain tensors (which must be equal on all ranks). Every rank calls this.

    ``timeout``: seconds after which a lost rank is an error. Raises OptionError for a ``norm_type`` that is not positive; RunError for a
    norm that is infinite or NaN if ``error_if_nonfinite``, and for a lost rank, which it names.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return clip(given, max_norm, norm_type, error_if_nonfinite, timeout)


@torch.no_grad()
def clip(
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    timeout: float,
    across: tuple[dist.ProcessGroup, torch.device] | None = None,
) -> torch.Tensor:
    """As ``clip_grad_norm_``; the norm is that of the gradients of all ranks of a group, each of which has its own, if ``across`` gives one
    and its device."""
    order, limit = _positive("norm_type", norm_type), _positive("max_norm", max_norm)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads and across is None:
        return torch.tensor(0.0)
    total = _norm(grads, order, timeout, across)
    if error_if_nonfinite and not bool(total.isfinite()):
        remedy = "look for the loss that is infinite or NaN, or leave error_if_nonfinite out"
        raise RunError(f"the norm of order {order} of the gradients is {float(total)}", remedy=remedy)
    scale = torch.clamp(limit / (total + 1e-6), max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local.device))
    return total


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | torch.Tensor) or not float(value) > 0:
        text = value if isinstance(value, int | float) else a_kind(value)
        raise OptionError(f"{name} is {text}", remedy="give a positive number, math.inf for the largest entry")
    return float(value)


def _norm(
    grads: Sequence[torch.Tensor], order: float, timeout: float, across: tuple[dist.ProcessGroup, torch.device] | None
) -> torch.Tensor:
    """The norm of all gradients, in the widest dtype among them, at least float32."""
    dtype = torch.float32
    meshes: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for grad in grads:
        dtype = torch.promote_types(dtype, grad.dtype.to_real())
        meshes.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    parts = []
    for mesh, found in meshes.items():
        own = [x for grad in found if (x := _own_part(grad)) is not None and x.numel()]
        device = found[0].device if mesh is None else torch.device(mesh.device_type)  # gradients may be on the host
        part = _partial_norm(own, order, device)
        for axis in range(0 if mesh is None else mesh.ndim):
            assert mesh is not None
            _over_ranks(part, order, mesh.get_group(axis), timeout)
        parts.append(part.to(grads[0].device))
    joint = torch.stack(parts) if parts else torch.zeros(1, 2, dtype=torch.float64)
    total = joint.sum(0) if order != math.inf else joint.amax(0)
    if across is not None:
        total = total.to(across[1])
        _over_ranks(total, order, across[0], timeout)
    if order != math.inf:
        return (total[0] ** (1 / order)).to(dtype)
    largest = total[0].to(dtype)
    return largest.where(total[1] == 0, torch.full_like(largest, math.nan))


def _over_ranks(part: torch.Tensor, order: float, group: dist.ProcessGroup, timeout: float) -> None:
    with watching("take the norm of the gradients", group, timeout):
        dist.all_reduce(part, dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM, group=group)


def _partial_norm(own: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """[2], float64: the sum of |x| ** order, or the largest |x|; and whether there is a NaN, which a backend's maximum may drop."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for x in own:
        norm = torch.linalg.vector_norm(x, order, dtype=torch.promote_types(x.dtype, torch.float32)).to(torch.float64)
        if order != math.inf:
            total[0] += norm**order
        else:
            total[1] = torch.maximum(total[1], norm.isnan().to(torch.float64))
            total[0] = torch.maximum(total[0], norm.nan_to_num(nan=0.0, posinf=math.inf))
    return total


def _own_part(grad: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient; None if a rank with a lower index on a replicating axis counts the same part."""
    if not isinstance(grad, DTensor):
        return grad
    if any(isinstance(p, Partial) for p in grad.placements):
        grad = grad.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in grad.placements])
    at = grad.device_mesh.get_coordinate()
    if at is None or any(i > 0 and isinstance(p, Replicate) for i, p in zip(at, grad.placements, strict=True)):
        return None
    return grad.to_local()
