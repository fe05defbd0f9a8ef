"""Functions of DTensors for tests of the backend on two ranks: their arguments, and the comparison with eager DTensor in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

R, S0, S1, P = [Replicate()], [Shard(0)], [Shard(1)], [Partial()]
Arguments = Callable[[DeviceMesh], list[Tensor]]


def whole(*shape: int) -> Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 1.3).reshape(shape)


def own(*shape: int) -> Arguments:
    """A tensor that differs among ranks."""
    return lambda mesh: [(whole(*shape) + mesh.get_local_rank()).requires_grad_()]


def dtensor(placement: Any, *shape: int, add: float = 0.0) -> Arguments:
    return lambda mesh: [distribute_tensor(whole(*shape) + add, mesh, [placement]).requires_grad_()]


def both(*several: Arguments) -> Arguments:
    return lambda mesh: [one for arguments in several for one in arguments(mesh)]


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def run(function: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """The results and the gradients of ``args`` (without one, what became of the argument itself), DTensors as whole values."""
    return results_and_gradients(function(*args), args)


def placements_of(out: Any) -> list[Any]:
    """The placements of each result, None for plain tensors."""
    return [getattr(r, "placements", None) for r in (out if isinstance(out, tuple) else [out])]


def results_and_gradients(out: Any, args: list[Tensor]) -> list[Tensor]:
    """As of ``run``, for the results ``out``."""
    results = [full(r) for r in (out if isinstance(out, tuple) else [out])]
    wanted = [r for r in results if r.requires_grad]
    if wanted:
        sum((r**2).sum() for r in wanted).backward()
    return [*results, *(full(a if a.grad is None else a.grad) for a in args)]


def same(function: Callable[..., Any], arguments: Arguments, **options: Any) -> None:
    """``function`` of the mesh and ``arguments``, compiled for the backend and eager, has equal results and gradients.

    ``options``: those of ``torch.compile``.
    """
    mesh = DeviceMesh("cpu", [0, 1])
    call = lambda *args: function(mesh, *args)  # noqa: E731
    compiled = torch.compile(call, backend="fxshard", fullgraph=True, options={"compiler": "eager", "timeout": 60.0}, **options)
    given, own = arguments(mesh), arguments(mesh)
    out, wanted = compiled(*given), call(*own)
    assert placements_of(out) == placements_of(wanted)
    have, want = results_and_gradients(out, given), results_and_gradients(wanted, own)
    assert [x.shape for x in have] == [x.shape for x in want]
    for x, y in zip(have, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
