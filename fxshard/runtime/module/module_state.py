"""The state of a module on which its programs depend, read on each call: its submodules, parameters, buffers and hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.calls import held_buffers_of, held_parameters_of, parts_of
from fxshard._torch_compat.dtensor.shards import spec_or_none
from fxshard._torch_compat.dynamo.hooks import Hook, any_global_hooks, any_hooks, global_hooks, hooks_of
from fxshard.errors import RunError
from fxshard.layout.layouts import sharding_axes
from fxshard.runtime.module.parameters import parameter_slots

Places = tuple[tuple[nn.Module, str], ...]
Hooks = tuple[tuple[int, Hook], ...]
"""(index of the module, hook) of all hooks of submodules; global hooks have index -1."""


@dataclass(frozen=True, eq=False)
class ModuleSnapshot:
    """Parameters and buffers at one moment. ``trainable``: whether each parameter requires a gradient; ``layouts``: placements,
    dtype and shape of each parameter, shape and dtype of each buffer, comparable."""

    trainable: tuple[bool, ...]
    specs: Sequence[Any]
    buffers: Sequence[torch.Tensor | None]
    layouts: tuple[Any, ...]


class ModuleState:
    """Reads the state of ``model``; rebuilds only what changed since the last call."""

    def __init__(self, model: nn.Module, device_mesh: DeviceMesh) -> None:
        self.model, self.device_mesh = model, device_mesh
        self.refresh()

    def refresh(self) -> None:
        """Records the modules, parameters and buffers of the model as it is now."""
        self.modules = list(self.model.modules())
        self.states = [vars(module) for module in self.modules]
        self.places: Places = tuple((owner, key) for owner, key, _ in parameter_slots(self.model))
        self.buffers: Places = tuple(
            (module, key) for module in self.modules for key, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        )
        self.tables = [[(vars(owner), key) for owner, key in places] for places in (self.places, self.buffers)]
        self.parts = parts_of(self.states)
        self.last: ModuleSnapshot | None = None

    def same_structure(self) -> bool:
        """Whether the model still has the modules and parameters that were recorded; their values do not matter."""
        return parts_of(self.states) == self.parts

    def snapshot(self) -> ModuleSnapshot:
        """The current parameters and buffers; raises RunError for a parameter that is not a DTensor on the mesh."""
        parameters, buffers = held_parameters_of(self.tables[0]), held_buffers_of(self.tables[1])
        trainable, specs = tuple([p.requires_grad for p in parameters]), [*map(spec_or_none, parameters)]
        last = self.last
        if last is None or not all(map(is_, specs, last.specs)) or not all(map(is_, buffers, last.buffers)):
            layouts = (tuple(map(self._layout_of, range(len(parameters)), parameters)), tuple(map(_kind, buffers)))
            last = self.last = ModuleSnapshot(trainable, specs, buffers, layouts)
        elif trainable != last.trainable:
            last = self.last = ModuleSnapshot(trainable, specs, buffers, last.layouts)
        return last

    def _layout_of(self, place: int, value: torch.Tensor) -> Any:
        settled = isinstance(value, DTensor) and not any(value.placements[k].is_partial() for k in sharding_axes(value.device_mesh.shape))
        if settled and value.device_mesh == self.device_mesh:
            return value.placements, value.dtype, value.shape
        name = self.parameter_name(place)
        if isinstance(value, DTensor):
            found = f"on another mesh, {value.device_mesh}" if settled else f"in {value.placements}, a sum that is pending"
            what = f"parameter {name}, assigned after parallelize, is {found}"
        else:
            what = f"parameter {name} is a plain tensor, assigned after parallelize (or by functional_call)"
        raise RunError(what, where=name, remedy=f"assign it before parallelize, or {_as_dtensor(self.device_mesh)}")

    def parameter_name(self, place: int) -> str:
        owner, key = self.places[place]
        prefix = self.module_name(self.modules.index(owner))
        return f"{prefix}.{key}" if prefix else key

    def module_name(self, index: int) -> str:
        """The name of a module by its index in ``modules``."""
        return next((name for name, module in self.model.named_modules() if module is self.modules[index]), "")

    def hooks(self) -> Hooks:
        """The hooks that take part in a program; the model's own run around it."""
        found: list[tuple[int, Hook]] = []
        if any_global_hooks():
            found += [(-1, hook) for hook in global_hooks()]
        if any_hooks(self.states[1:]):
            found += [(place, hook) for place, module in enumerate(self.modules) if place for hook in hooks_of(module)]
        return tuple(found)


def _as_dtensor(device_mesh: DeviceMesh) -> str:
    return f"as a DTensor: torch.distributed.tensor.distribute_tensor(value, device_mesh, placements) for the mesh {device_mesh}"


def refuse_plain_parameters(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Raises RunError for a parameter that is no DTensor: it was assigned after ``parallelize_module``, and an optimiser that holds it
    would lose it at the first call, which puts a DTensor in its place. Also for a tensor that is no parameter: ``functional_call`` has
    put it in the place of one."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, torch.nn.Parameter):
            what = f"the first call after parallelize_module is a functional_call, with a value in place of parameter {name}"
            remedy = "call the module once before, or give parallelize_module example_args: this call is planned for, and moves parameters"
            raise RunError(what, where=name, remedy=remedy)
        if not isinstance(parameter, DTensor):
            what = f"parameter {name} is a plain tensor, assigned after parallelize_module (or by functional_call)"
            remedy = f"assign it before, or {_as_dtensor(device_mesh)}; or call parallelize_module again, and make the optimiser after that"
            raise RunError(what, where=name, remedy=remedy)


def hook_fields(state: ModuleState) -> dict[str, str]:
    """Fields for ``launch.compare``: a hook on one rank only would make that rank plan a program alone."""
    found = [f"{hook.kind} of {'all modules' if hook.everywhere else state.module_name(i)}" for i, hook in state.hooks()]
    return {"hooks": ", ".join(found)} if found else {}


def same_hooks(before: Hooks, now: Hooks) -> bool:
    """Whether the same functions are registered on the same modules; a hook that was removed and added again is the same."""
    if before is now or not (before or now):
        return True
    plain = [[(i, h.kind, h.call, h.with_kwargs) for i, h in hooks] for hooks in (before, now)]
    return plain[0] == plain[1]


def _kind(value: torch.Tensor | None) -> Any:
    return None if value is None else (value.shape, value.dtype)


_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def original_forward(model: nn.Module, own: Any) -> Iterator[None]:
    """A context in which ``model`` has its original forward (``own``, if it was an attribute) and none of its own hooks, which run around
    the sharded forward. Modules inside it that have sharded forwards of their own have their original ones too, with their hooks."""
    inner = [(vars(module), forward) for module in model.modules() if getattr(forward := vars(module).get("forward"), "entry", False)]
    state = vars(model)
    tables = {name: state[name] for name in _HOOK_TABLES if name in state}
    state.update({name: type(table)() for name, table in tables.items()})
    owners = [(state, state.get("forward"), own), *((found, now, now.replaced) for found, now in inner if found is not state)]
    for found, _, original in owners:
        found.pop("forward", None)
        if original is not None:
            found["forward"] = original
    try:
        yield
    finally:
        for found, now, _ in owners:
            found.pop("forward", None)
            if now is not None:
                found["forward"] = now
        state.update(tables)
