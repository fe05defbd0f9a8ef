"""Plans made ahead of models that torch has distributed already: DTensors among parameters, buffers and arguments keep their layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.fully_shard import is_fully_sharded
from fxshard.errors import OptionError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.passes.pipeline import Compilation, Request, make_plan, trace_model
from fxshard.plans.constraints import Held
from fxshard.runtime.module.fully_sharded import check_part, fully_shard_set_aside
from fxshard.runtime.module.parameters import held_layout, with_held
from fxshard.runtime.simulate.values import argument_values


def plan_as_held(request: Request, mesh: Mesh | DeviceMesh, dump: str | Path | None) -> Compilation:
    """``make_plan`` of the request's model, which may consist of DTensors and be under ``fully_shard``; nothing is sent, and it stays so.

    DTensors keep their layouts, as ``parallelize`` keeps them, unless the request says otherwise of their names. Raises OptionError for a
    DTensor on another mesh, for a buffer or argument that ``parallelize`` could not take, and as that for what ``fully_shard`` was asked
    for.
    """
    model, whole = request.model, as_mesh(mesh)
    assert model is not None
    with fully_shard_set_aside(model, mesh) as moved:
        weights, arguments = dict(distributed(model)), _arguments(request.args, request.kwargs)
        if not weights and not arguments:
            return make_plan(Compilation(whole, request), dump)
        for name, tensor in {**weights, **arguments}.items():
            check_part(tensor.device_mesh, mesh, name)
        _check_buffers(model)
        for name, tensor in arguments.items():
            if tensor.device_mesh.ndim != whole.ndim:
                what = f"{name} is a DTensor on {tensor.device_mesh}, a part of {whole}"
                raise OptionError(what, where=name, remedy="redistribute it on the whole mesh, or give a plain tensor")
        held = {name: held_layout(tensor, moved.get(id(tensor))) for name, tensor in {**weights, **arguments}.items()}
        graph = trace_model(request, whole, dump)
        return make_plan(Compilation(whole, _with(request, graph, held, whole.axis_names), graph), dump)


def traced_as_held(request: Request, mesh: Mesh, dump: str | Path | None) -> PlanningGraph:
    """``trace_model`` of the request's model, which may be under ``fully_shard``."""
    assert request.model is not None
    with fully_shard_set_aside(request.model, mesh):
        return trace_model(request, mesh, dump)


def check_whole(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, remedy: str) -> None:
    """Raises OptionError for DTensors among parameters, buffers and arguments, of which a process has a shard only."""
    needed = "of which this process has a shard: whole tensors are needed"
    for name, module in model.named_modules():
        if is_fully_sharded(module):
            raise OptionError(f"{name or 'the model'} is under fully_shard, {needed}", where=name or None, remedy=remedy)
    for name in (*dict(distributed(model)), *_arguments(args, kwargs)):
        raise OptionError(f"{name} is a DTensor, {needed}", where=name, remedy=remedy)


def distributed(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """The parameters and buffers that are DTensors, by each of their names."""
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if isinstance(tensor, DTensor):
            yield name, tensor


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, DTensor]:
    return {name: x for name, x in argument_values(args, kwargs).items() if isinstance(x, DTensor)}


def _check_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if isinstance(buffer, DTensor) and not all(placement.is_replicate() for placement in buffer.placements):
            what = f"buffer {name} is a DTensor in {Layout(buffer.placements)}, and buffers are replicated"
            raise OptionError(what, where=name, remedy="keep the buffer whole, or make it a parameter that needs no gradient")


def _with(request: Request, graph: PlanningGraph, held: Mapping[str, Held], axes: Sequence[str]) -> Request:
    """The request with the layouts of DTensors of which it says nothing."""
    inputs = {end.name for end in graph.inputs_of("input")}
    weights = {end.name for end in graph.inputs} - inputs | set(graph.aliases)
    pins, layouts = request.pins, request.input_layouts
    if isinstance(pins, Mapping | None):
        pins = with_held({name: layout for name, layout in held.items() if name in weights}, pins or {}, graph)
    if not layouts or (isinstance(layouts, Mapping) and not set(layouts) <= set(axes)):  # else they are for all inputs
        layouts = {**{name: layout for name, layout in held.items() if name in inputs}, **(layouts or {})}
    return replace(request, pins=pins, input_layouts=layouts)
