"""Replaces parameters by DTensors in their planned layouts, in place: the module, names and ties stay the same."""

from __future__ import annotations

import fnmatch
import gc
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.dtensor.checkpointing import save_by_blocks
from fxshard._torch_compat.dtensor.copies import copy_slices
from fxshard._torch_compat.dtensor.packed import keep_packed
from fxshard._torch_compat.dtensor.shards import become_parameter
from fxshard._torch_compat.dtensor.swaps import holder_of, take_contents, without_flat_weights
from fxshard._torch_compat.dynamo.hooks import has_leaf_hooks
from fxshard.errors import PlanError, RunError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Block, Layout, local_blocks, local_shape
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.plans.constraints import Held
from fxshard.plans.offload import PARAMETERS
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.inputs import as_dtensor, has_layout
from fxshard.runtime.groups.distribute import distribute
from fxshard.runtime.optim.anomaly import agree_on_anomalies
from fxshard.runtime.optim.grad_scaler import agree_on_overflows
from fxshard.runtime.optim.host_state import on_host, place_on_host
from fxshard.runtime.optim.local_steps import step_locally
from fxshard.runtime.ranks.launch import ends_together, mesh_ranks
from fxshard.runtime.simulate.shards import scatter


def parameter_layouts(program: ShardedProgram) -> dict[str, Layout]:
    """The layouts of the parameters, by each of their names."""
    found = {end.name: layout for end, layout in zip(program.inputs, program.input_layouts, strict=True) if end.kind == "parameter"}
    found.update({alias: found[name] for alias, name in program.aliases.items() if name in found})
    return found


def offloads_of(model: nn.Module) -> dict[str, str]:
    """What is on the host now, by the parameter's names."""
    found = {name: on_host(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: kind for name, kind in found.items() if kind is not None}


def drop_gradients(model: nn.Module, memo: Mapping[int, Any]) -> None:
    """While ``model`` is deep-copied: the copies of its parameters, in ``memo`` by the originals' ids, have no gradients, like those of
    plain parameters; torch copies a DTensor's."""
    for parameter in model.parameters():
        if isinstance(made := memo.get(id(parameter)), torch.Tensor):
            made.grad = None


def on_mesh(parameter: DTensor, device_mesh: DeviceMesh) -> DTensor:
    """A parameter on a part of ``device_mesh`` as one on all of it, replicated over the other axes."""
    if as_mesh(parameter.device_mesh).axis_names == as_mesh(device_mesh).axis_names:
        return parameter
    return as_dtensor(parameter.to_local().detach(), device_mesh, layout_on(parameter, as_mesh(device_mesh)), tuple(parameter.shape))


def layout_on(parameter: DTensor, mesh: Mesh) -> Layout:
    """The layout of a parameter on ``mesh``, of which its own may be a part: replicated over the other axes."""
    known = placements_by_axis(parameter)
    return Layout(known.get(name, Replicate()) for name in mesh.axis_names)


def held_parameters(model: nn.Module, graph: PlanningGraph) -> dict[str, DTensor]:
    """The parameters that are DTensors, by each of their names that ``graph`` has."""
    known = {end.name for end in graph.inputs} | set(graph.aliases)
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name in known and isinstance(parameter, DTensor)}


def held_layout(tensor: DTensor, placements: Sequence[Placement] | None = None, movable: bool = True) -> Held:
    """The layout that a DTensor has, or will have if ``placements`` are others; axes that its mesh lacks are open. ``movable``: whether
    the plan may move it."""
    return Held(dict(zip(as_mesh(tensor.device_mesh).axis_names, placements or tensor.placements, strict=True)), movable)


def with_held(held: Mapping[str, Any], pins: Mapping[str, Any], graph: PlanningGraph) -> dict[str, Any]:
    """The user's pins, and of ``held``, name -> layout, what no pin names: by name, by another name of a tied parameter, or by a glob."""
    names: dict[str, list[str]] = {}
    for name in held:
        names.setdefault(graph.aliases.get(name, name), []).append(name)
    for alias, name in graph.aliases.items():
        names.setdefault(name, []).append(alias)
    pinned = {name for name, all_names in names.items() if any(fnmatch.fnmatchcase(n, pin) for n in (name, *all_names) for pin in pins)}
    return {**{name: layout for name, layout in held.items() if graph.aliases.get(name, name) not in pinned}, **pins}


def placements_by_axis(parameter: DTensor) -> dict[str, Placement]:
    return dict(zip(as_mesh(parameter.device_mesh).axis_names, parameter.placements, strict=True))


def check_parameters(model: nn.Module, program: ShardedProgram) -> None:
    """Raises PlanError unless each parameter has the layout in which the program reads it."""
    layouts = parameter_layouts(program)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layout = layouts.get(name)
        if layout is not None and not (isinstance(parameter, DTensor) and has_layout(parameter, layout)):
            have = Layout(parameter.placements) if isinstance(parameter, DTensor) else "a plain tensor"
            raise PlanError(f"parameter {name} is {have}, the plan reads it in {layout}", remedy="plan with the parameters as they are")


def shard_parameters(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    device_mesh: DeviceMesh,
    device: torch.device,
    source: int | None = None,
    offloaded: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Replaces every parameter by a DTensor in its layout, replicated if ``layouts`` lacks it.

    Shards the full value that this rank holds, or that of rank ``source`` (see ``distribute``); a parameter on meta stays
    there, in the shape of its shard. Buffers move to ``device``. A parameter that is a DTensor already stays the object that it is, with
    other contents, for optimisers that hold it. ``offloaded``: what is on the host, by a parameter's name.
    """
    whole = Layout.replicated(device_mesh.ndim)
    made: dict[int, nn.Parameter] = {}
    names: dict[int, list[str]] = {}
    made_buffers: set[int] = set()
    wanted: dict[int, Layout] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        if name in layouts:
            wanted.setdefault(id(parameter), layouts[name])
    keep_packed()  # before a parameter is made of a DTensor, which detaches it
    with torch.no_grad(), without_flat_weights(model):
        moving = {name: p for name, p in model.named_parameters() if _moves(p, wanted.get(id(p), whole), device_mesh)}
        check_free(moving, device_mesh)
        for owner, key, parameter in parameter_slots(model):
            if id(parameter) not in made:
                layout = wanted.get(id(parameter), whole)
                kind = next((offloaded[n] for n in names[id(parameter)] if n in offloaded), None)
                value = shard_tensor(parameter, layout, device_mesh, device, source)
                if kind == PARAMETERS and device.type != "cpu":
                    value = as_dtensor(value.to_local().detach().cpu().pin_memory(), device_mesh, layout, tuple(parameter.shape))
                new = parameter if value is parameter else _parameter(value, parameter)
                if new is not parameter and parameter.grad is not None:
                    new.grad = shard_tensor(parameter.grad, layout, device_mesh, device, source)
                if new is not parameter and isinstance(parameter, DTensor):
                    take_contents(parameter, new)
                    new = parameter
                if kind is not None:
                    place_on_host(new, kind)
                made[id(parameter)] = new
            setattr(owner, key, made[id(parameter)])
        step_locally(made.values())
        agree_on_overflows()
        agree_on_anomalies()
        copy_slices()
        save_by_blocks(blocks_of)
        for module in model.modules():
            for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                if buffer.is_meta or isinstance(buffer, DTensor):
                    continue
                if buffer.device != device:
                    buffer = buffer.to(device)
                    setattr(module, key, buffer)
                if source is not None and id(buffer) not in made_buffers:
                    made_buffers.add(id(buffer))
                    buffer.copy_(distribute(buffer, whole, device_mesh, source))


def _moves(parameter: nn.Parameter, layout: Layout, device_mesh: DeviceMesh) -> bool:
    """Whether a DTensor has to take other contents for ``layout`` on ``device_mesh``."""
    if not isinstance(parameter, DTensor):
        return False
    return as_mesh(parameter.device_mesh).axis_names != as_mesh(device_mesh).axis_names or not has_layout(parameter, layout)


def check_free(moving: Mapping[str, nn.Parameter], device_mesh: DeviceMesh) -> None:
    """Raises RunError, on all ranks and before anything is changed, if one of the parameters, which are to take other contents, is held by
    what would not follow."""
    if not moving:
        return
    with ends_together("move the parameters", ranks=mesh_ranks(device_mesh)):
        if any(holder_of(parameter) for parameter in moving.values()):
            gc.collect()  # it may be held by what nobody uses
        for name, parameter in moving.items():
            if (holder := holder_of(parameter)) is not None:
                what = f"parameter {name} has to move to another layout, and {holder} holds it as it is"
                remedy = "let go of that (del, or backward()) and call again, or give parallelize_module example_args, to plan at once"
                raise RunError(what, where=name, remedy=remedy)


def _parameter(value: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """``value`` in the place of ``parameter``."""
    if isinstance(value, DTensor) and not isinstance(parameter, DTensor):
        return become_parameter(value, parameter.requires_grad)
    return nn.Parameter(value, parameter.requires_grad)


def shard_for_program(model: nn.Module, program: ShardedProgram, device_mesh: DeviceMesh, device: torch.device, source: int | None) -> None:
    """``shard_parameters`` in the layouts in which the program reads them, and in the places of its plan."""
    offloaded = {program.plan.called(node): kind for node, kind in program.plan.on_host.items()}
    shard_parameters(model, parameter_layouts(program), device_mesh, device, source, offloaded)


def blocks_of(tensor: DTensor) -> tuple[Block, ...]:
    """The blocks of a DTensor that this rank holds."""
    mesh = tensor.device_mesh
    return local_blocks(tuple(tensor.shape), Layout(tensor.placements), tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))


def check_gradient_hooks(model: nn.Module) -> None:
    """Raises RunError for a parameter with hooks: they would not be called for the DTensor that replaces it."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) and has_leaf_hooks(parameter):
            what = f"parameter {name} has a hook for its gradient, which would not be called for the DTensor that takes its place"
            raise RunError(what, where=name, remedy="register it after parallelize: model.get_parameter(name).register_hook(...)")


def parameter_slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(owner, attribute, parameter) for every attribute that holds a parameter; a tied parameter occurs several times."""
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield module, key, parameter


def shard_tensor(
    parameter: torch.Tensor, layout: Layout, device_mesh: DeviceMesh, device: torch.device, source: int | None = None
) -> torch.Tensor:
    """``parameter`` as a DTensor in ``layout``; a shard gets memory of its own. ``source`` as in ``shard_parameters``."""
    if isinstance(parameter, DTensor):
        parameter = on_mesh(parameter, device_mesh)
        return parameter if has_layout(parameter, layout) else parameter.redistribute(placements=tuple(layout)).detach()
    mesh = as_mesh(device_mesh)
    coordinate = tuple(device_mesh.get_coordinate() or ())
    if parameter.is_meta:
        local = torch.empty(local_shape(parameter.shape, layout, mesh.shape, coordinate), dtype=parameter.dtype, device="meta")
    elif source is not None:
        local = distribute(parameter.detach().to(device), layout, device_mesh, source)
    else:
        local = scatter(parameter.detach(), layout, mesh, coordinate).to(device)
        if not layout.is_replicated and local.untyped_storage().nbytes() > local.nbytes:
            local = local.clone()
    return as_dtensor(local, device_mesh, layout, tuple(parameter.shape))
