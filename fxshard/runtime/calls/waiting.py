"""WaitingForward: the ``forward`` of a module that is parallelized at its first call, and what becomes of it if the program of a module
around it takes its place."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fxshard.errors import OptionError
from fxshard.mesh.mesh import Mesh
from fxshard.plans.parallel import AxisPlan, ByName, Parallel, read_parallel
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.calls.settings import Settings

_KNOWN: weakref.WeakSet[WaitingForward] = weakref.WeakSet()
"""All of this process: a call for a part has to find the forward of the module around it, which the part does not know."""
OF_ONE_PLAN = ("input_layouts", "output_layouts", "memory_limit", "constraints", "offload", "example_sizes")
"""Settings that mean nothing for a part of what is planned."""


@dataclass(eq=False, repr=False)
class WaitingForward:
    """``replaced``: the instance's own ``forward``, if it had one. ``open_parameters``: DTensors whose layouts the first plan decides.
    ``mesh``, ``settings``: how it is planned. ``reduces``: False within ``no_sync``."""

    module: nn.Module
    replaced: Any
    open_parameters: Sequence[nn.Parameter]
    mesh: Mesh
    settings: Settings
    reduces: bool = field(default=True, kw_only=True)

    waits = True

    def __post_init__(self) -> None:
        _KNOWN.add(self)

    def __repr__(self) -> str:
        return f"<forward of {type(self.module).__name__}, which is planned at its first call>"

    def remove(self) -> None:
        """Gives the module its own forward back."""
        del self.module.forward
        if self.replaced is not None:
            self.module.forward = self.replaced


Waiting = tuple[tuple[str, WaitingForward], ...]
"""(name of the module, its forward that waited)."""


def dissolve(model: nn.Module) -> Waiting:
    """Removes the forwards of modules that wait for a first call, since the program of the whole model takes their place."""
    forwards = [(name, vars(module).get("forward")) for name, module in model.named_modules()]
    waiting = tuple((name, forward) for name, forward in forwards if isinstance(forward, WaitingForward))
    for _, forward in waiting:
        forward.remove()
    return waiting


def open_in(waiting: Waiting) -> list[nn.Parameter]:
    """The DTensors whose layouts these forwards leave to a plan."""
    return [parameter for _, forward in waiting for parameter in forward.open_parameters]


def in_place_of(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """``value``, which is assigned in the place of ``parameter``; a parameter of its own, left open too, if a forward that waits leaves the
    layout of ``parameter`` open."""
    waiting = [forward for forward in list(_KNOWN) if any(one is parameter for one in forward.open_parameters)]
    if not waiting:
        return value
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for forward in waiting:
        forward.open_parameters = [*forward.open_parameters, made]
    return made


def taken_over(module: nn.Module, waiting: Waiting) -> tuple[list[nn.Parameter], dict[str, Any]]:
    """What forwards that wait leave open of ``module``: (the parameters of which nothing is said, which are replicated; by name what is
    said of the others, by axis). A forward around ``module`` no longer decides on either."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    known = [forward for forward in list(_KNOWN) if vars(forward.module).get("forward") is forward]
    unsaid, partly = [], {}
    for forward in (*(forward for _, forward in waiting), *known):
        pins = {} if not isinstance(forward.settings.pins, Mapping) else forward.settings.pins
        named = forward.module.named_parameters(remove_duplicate=False)
        said = {id(parameter): pins[name] for name, parameter in named if isinstance(pins.get(name), Mapping)}
        mine = [parameter for parameter in forward.open_parameters if id(parameter) in names]
        forward.open_parameters = [parameter for parameter in forward.open_parameters if id(parameter) not in names]
        unsaid += [parameter for parameter in mine if id(parameter) not in said]
        partly.update({names[id(parameter)]: said[id(parameter)] for parameter in mine if id(parameter) in said})
    return unsaid, partly


def with_parts(settings: Settings, mesh: Mesh, waiting: Waiting) -> Settings:
    """``settings`` with the pins and the names with styles that parts of the model were given before. What the module itself was given
    before counts where ``settings`` say nothing. Raises OptionError for what does not hold for a part of a plan."""
    for name, forward in reversed(waiting):
        if name:
            _check_part(name, forward, read_parallel(settings.parallel, mesh))
        else:
            unsaid = {field: getattr(forward.settings, field) for field in OF_ONE_PLAN if not getattr(settings, field)}
            settings = replace(settings, **unsaid)
        parallel = _parallel(settings.parallel, mesh, name, forward)
        settings = replace(settings, pins=_pins(settings.pins, mesh, name, forward), parallel=parallel)
    return settings


def _check_part(name: str, forward: WaitingForward, whole: Parallel) -> None:
    given, words = forward.settings, read_parallel(forward.settings.parallel, forward.mesh)
    said = [field for field in OF_ONE_PLAN if getattr(given, field)]
    said += ["a ShardingPlan as pins"] if isinstance(given.pins, ShardingPlan) else []
    said += [f"{word} on {axis}" for axis, word in words.items() if not isinstance(word, ByName) and word != whole.get(axis)]
    if said:
        what = f"{name} was parallelized with {', '.join(said)}, which the plan of a module around it cannot keep for a part"
        raise OptionError(what, where=name, remedy="give it for the whole model, or give this part styles, a tp_plan or pins")


def _pins(pins: Any, mesh: Mesh, name: str, forward: WaitingForward) -> Any:
    """The pins of both. A layout on another mesh has no meaning on this one, unless it is said by axis."""
    given = forward.settings.pins
    if not given or isinstance(pins, ShardingPlan):
        return pins
    if isinstance(given, ShardingPlan):
        return pins or given
    if forward.mesh.axis_names != mesh.axis_names and not all(isinstance(layout, Mapping) for layout in given.values()):
        what = f"{name or 'the model'} has pins on the mesh {forward.mesh}, the plan is for {mesh}"
        raise OptionError(what, where=name, remedy="write pins by axis, {'weight': {'tp': 'S(0)'}}, or parallelize both on one mesh")
    return {**{_within(name, glob): layout for glob, layout in given.items()}, **(pins or {})}


def _parallel(parallel: Any, mesh: Mesh, name: str, forward: WaitingForward) -> Any:
    given, found = read_parallel(forward.settings.parallel, forward.mesh), read_parallel(parallel, mesh)
    if not given:
        return parallel
    return {**found, **{axis: _both(found.get(axis), _part(word, name), axis, name) for axis, word in given.items()}}


def _part(word: AxisPlan, name: str) -> AxisPlan:
    return ByName(tuple((_within(name, glob), style) for glob, style in word.styles)) if isinstance(word, ByName) else word


def _both(whole: AxisPlan | None, part: AxisPlan, axis: str, name: str) -> AxisPlan:
    """What an axis is for: the names of both, or what was said last for the whole."""
    if isinstance(whole, ByName) and isinstance(part, ByName):
        return ByName(whole.styles + part.styles)
    if whole not in (None, part) and name:
        what = f"{name} was given names with styles on {axis}, and the model {whole} there"
        raise OptionError(what, where=name, remedy="give the model names with styles too, or leave the axis to the part")
    return part if whole is None else whole


def _within(name: str, glob: str) -> str:
    return f"{name}.{glob}" if name else glob
