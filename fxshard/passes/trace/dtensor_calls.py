"""DTensor's own API in a forward: captured as whole values, with notes of the layouts that it names.

A model is traced on whole tensors. So ``DTensor.from_local`` and ``redistribute`` leave their value as it is and say in which layout it
must be (``fxshard.placed``); ``to_local`` and ``full_tensor`` say in which form it is handed out. Code between ``to_local`` and the next
``from_local`` computes on the whole tensor too, and so gives the numbers of one device. The hooks that
``torch.distributed.tensor.parallel`` installs consist of such calls.

For unsupported arguments they raise NotImplementedError, not an FxshardError: Dynamo interprets the raise as part of the model, and
``trace_errors`` turns it into a TraceError that names the user's line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.calls import plain_tensors_only
from fxshard._torch_compat.dynamo.replaced_calls import captured_instead
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh
from fxshard.passes.trace.named_layouts import LocalInputsError, placements_on

ARGUMENT = "fxshard_argument"
"""The attribute that holds the name of an argument."""
_DECLARED: ContextVar[dict[str, dict[str, Placement]]] = ContextVar("declared")


def dtensor_calls(model: nn.Module) -> AbstractContextManager[None]:
    """While Dynamo captures ``model``: replaces DTensor's API by notes on whole tensors."""
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in model.parameters()}
    attributes = {"device_mesh": next(iter(meshes))} if len(meshes) == 1 and None not in meshes else {}
    return captured_instead(CALLS, METHODS if meshes - {None} else {}, attributes)


@contextlib.contextmanager
def declared_shards(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Raises LocalInputsError if a capture fails in which the model takes some of ``arguments``, fakes by name, as a rank's shards: whole
    tensors, with which it computes, have other sizes. A capture that succeeds leaves this to ``named_layouts``."""
    for name, argument in arguments.items():
        if isinstance(argument, Tensor):
            setattr(argument, ARGUMENT, name)
    declared: dict[str, dict[str, Placement]] = {}
    token = _DECLARED.set(declared)
    try:
        yield
    except Exception as error:
        if declared:
            raise LocalInputsError(declared, None) from error
        raise
    finally:
        _DECLARED.reset(token)


class Placed(Tensor):
    """A whole value in a captured forward that the model regards as a DTensor: results computed from it are ``Placed`` too."""

    @property
    def placements(self) -> None:
        """Unknown while capturing: unequal to any placements, so that code that compares them redistributes."""
        return None

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        """As ``Tensor.unflatten``, whose call of ``super()`` Dynamo does not trace in a subclass."""
        return torch.unflatten(self, dim, sizes)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, *, async_op: bool = False, **dtypes: Any
    ) -> Tensor:
        return redistributed(self, device_mesh, placements, async_op=async_op, **dtypes)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        return local(self)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        return whole(self)


def from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: Any = None,
    stride: Any = None,
    grad_placements: Any = None,
) -> Tensor:
    """The whole value of which ``local_tensor`` is declared to be a shard."""
    layout, axes = _texts(device_mesh, placements)
    _note(getattr(local_tensor, ARGUMENT, None), layout, axes)
    return _as_placed(torch.ops.fxshard.placed(local_tensor, layout, axes, True))


def distributed(
    tensor: Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, *, src_data_rank: int | None = 0
) -> Tensor:
    layout, axes = _texts(device_mesh, placements)
    return _as_placed(torch.ops.fxshard.placed(tensor, layout, axes, False))


def redistributed(
    x: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: Any = None,
    backward_dtype: Any = None,
) -> Tensor:
    if forward_dtype is not None or backward_dtype is not None:
        raise NotImplementedError("redistribute changes a dtype: convert the tensor before it")
    layout, axes = _texts(device_mesh, placements)
    return _as_placed(torch.ops.fxshard.placed(x, layout, axes, False))


def local(x: Tensor, *, grad_placements: Any = None) -> Tensor:
    with plain_tensors_only():
        return torch.ops.fxshard.handed_out(x, "local")


def whole(x: Tensor, *, grad_placements: Any = None) -> Tensor:
    with plain_tensors_only():
        return torch.ops.fxshard.handed_out(x, "whole")


def _as_placed(x: Tensor) -> Tensor:
    return x if isinstance(x, Placed) else x.as_subclass(Placed)


@torch.compiler.assume_constant_result
def _texts(device_mesh: DeviceMesh | None, placements: Sequence[Placement] | None) -> tuple[str, str]:
    """A layout, replicated by default, and its axes as texts: ``"S(1)"``, ``"tp=4"``; no axes if the call names no mesh."""
    mesh = None if device_mesh is None else as_mesh(device_mesh)
    if placements is None:
        placements = [Replicate()] * (1 if mesh is None else mesh.ndim)
    return str(Layout(placements)), "" if mesh is None else str(mesh)


@torch.compiler.assume_constant_result
def _note(argument: str | None, layout: str, axes: str) -> None:
    """Notes, while Dynamo captures, in which layout the model takes an argument."""
    if argument is not None and any(p.is_shard() for p in Layout.parse(layout)):
        _DECLARED.get()[argument] = placements_on(layout, axes)


CALLS: dict[Any, Callable[..., Any]] = {DTensor.from_local: from_local, distribute_tensor: distributed}
METHODS: dict[str, Callable[..., Any]] = {"redistribute": redistributed, "to_local": local, "full_tensor": whole}
"""Methods that a plain tensor lacks, for models with parameters that are DTensors: in a capture these are plain."""
