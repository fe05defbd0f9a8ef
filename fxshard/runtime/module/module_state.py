"""What the programs of a parallelized module take for granted of it, looked at on each call: its modules, parameters, buffers, hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.calls import held_buffers_of, held_parameters_of, parts_of
from fxshard._torch_compat.dynamo.hooks import Hook, any_global_hooks, any_hooks, global_hooks, hooks_of
from fxshard._torch_compat.shards import spec_or_none
from fxshard.errors import RunError
from fxshard.runtime.module.parameters import held_parameters

Places = tuple[tuple[nn.Module, str], ...]
Hooks = tuple[tuple[int, Hook], ...]
"""(place of the module, hook) of all hooks of submodules; those of all modules are at place -1."""


@dataclass(frozen=True, eq=False)
class Held:
    """What was held at one moment. ``trained``: for each parameter whether it requires a gradient; ``lies``: how each lies, and
    the shapes and dtypes of buffers, comparable."""

    trained: tuple[bool, ...]
    specs: Sequence[Any]
    buffers: Sequence[torch.Tensor | None]
    lies: tuple[Any, ...]


class ModuleState:
    """Reads the state of ``model``; what did not change since the last call is not made anew."""

    def __init__(self, model: nn.Module, device_mesh: DeviceMesh) -> None:
        self.model, self.device_mesh = model, device_mesh
        self.refresh()

    def refresh(self) -> None:
        """Takes the modules, parameters and buffers that there are now for the right ones."""
        self.modules = list(self.model.modules())
        self.states = [vars(module) for module in self.modules]
        self.places: Places = tuple((owner, key) for owner, key, _ in held_parameters(self.model))
        self.buffers: Places = tuple(
            (module, key) for module in self.modules for key, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        )
        self.tables = [[(vars(owner), key) for owner, key in places] for places in (self.places, self.buffers)]
        self.parts = parts_of(self.states)
        self.last: Held | None = None

    def same_parts(self) -> bool:
        """Whether the model is made of the modules and parameters that it was made of; their values do not matter."""
        return parts_of(self.states) == self.parts

    def held(self) -> Held:
        """Raises RunError for a parameter that is no DTensor on the mesh."""
        parameters, buffers = held_parameters_of(self.tables[0]), held_buffers_of(self.tables[1])
        trained, specs = tuple([p.requires_grad for p in parameters]), [*map(spec_or_none, parameters)]
        last = self.last
        if last is None or not all(map(is_, specs, last.specs)) or not all(map(is_, buffers, last.buffers)):
            lies = (tuple(map(self._lies, range(len(parameters)), parameters)), tuple(map(_kind, buffers)))
            last = self.last = Held(trained, specs, buffers, lies)
        elif trained != last.trained:
            last = self.last = Held(trained, specs, buffers, last.lies)
        return last

    def _lies(self, place: int, value: torch.Tensor) -> Any:
        settled = isinstance(value, DTensor) and not any(p.is_partial() for p in value.placements)
        if settled and value.device_mesh == self.device_mesh:
            return value.placements, value.dtype, value.shape
        name = self.name(place)
        if isinstance(value, DTensor):
            lies = f"on another mesh, {value.device_mesh}" if settled else f"in {value.placements}, a sum that is pending"
            what = f"parameter {name}, put there after parallelize, lies {lies}"
        else:
            what = f"parameter {name} is a plain tensor, put there after parallelize (or by functional_call)"
        make = f"torch.distributed.tensor.distribute_tensor(value, device_mesh, placements) for the mesh {self.device_mesh}"
        raise RunError(what, where=name, remedy=f"put it there before parallelize, or as a DTensor: {make}")

    def name(self, place: int) -> str:
        owner, key = self.places[place]
        prefix = self.place(self.modules.index(owner))
        return f"{prefix}.{key}" if prefix else key

    def place(self, index: int) -> str:
        """The name of a module by its place among ``modules``."""
        return next((name for name, module in self.model.named_modules() if module is self.modules[index]), "")

    def hooks(self) -> Hooks:
        """Those that take part in a program: not the model's own, which run around it."""
        found: list[tuple[int, Hook]] = []
        if any_global_hooks():
            found += [(-1, hook) for hook in global_hooks()]
        if any_hooks(self.states[1:]):
            found += [(place, hook) for place, module in enumerate(self.modules) if place for hook in hooks_of(module)]
        return tuple(found)


def hook_fields(state: ModuleState) -> dict[str, str]:
    """For ``launch.compare``: a hook on one rank alone would have it make a program that others do not make."""
    found = [f"{hook.kind} of {'all modules' if hook.everywhere else state.place(i)}" for i, hook in state.hooks()]
    return {"hooks": ", ".join(found)} if found else {}


def same_hooks(before: Hooks, now: Hooks) -> bool:
    """Whether the same functions hang in the same places; a hook that was taken away and added again is the same."""
    if before is now or not (before or now):
        return True
    plain = [[(i, h.kind, h.call, h.with_kwargs) for i, h in hooks] for hooks in (before, now)]
    return plain[0] == plain[1]


def _kind(value: torch.Tensor | None) -> Any:
    return None if value is None else (value.shape, value.dtype)
