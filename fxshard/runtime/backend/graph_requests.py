"""The planning request for one graph of the backend: the layouts of the user's tensors, and the user's options."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fxshard.errors import ConstraintError, OptionError, PlanError, closest
from fxshard.graph.planning_graph import GraphInput, PlanningGraph, outputs_of
from fxshard.layout.layouts import Layout
from fxshard.passes.pipeline import Request
from fxshard.passes.planning.constrain import Condition, pattern
from fxshard.passes.planning.names import Names
from fxshard.plans.constraints import Constraint, Pin, check_constraints, names_in
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.backend.backend_options import BackendOptions
from fxshard.runtime.module.several_sizes import sampled_sizes
from fxshard.shapes import WeightedSizes, weighted_sizes

log = logging.getLogger("fxshard")

NamedTensors = Mapping[str, torch.Tensor]
"""The user's tensors by the names of the graph's inputs."""


def request_of(
    graph: PlanningGraph, named: NamedTensors, distributed: Sequence[bool], options: BackendOptions, fragment: bool, first: bool
) -> Request:
    """The request: plain tensors replicated, DTensors in their layouts, plain outputs replicated, then the user's layouts and pins.

    ``distributed``: for each output whether it is a DTensor. ``first``: whether this is the first program of the Dynamo graph. A name
    that matches nothing here is an error, or only a warning if the graph is one of several of the model (``fragment``).
    Raises ConstraintError for a pin that contradicts the layout of a tensor, PlanError for a DTensor on another mesh.
    """
    _check_meshes(named, options)
    pins, constraints = _user_pins(graph, named, options, fragment), _user_constraints(graph, named, options, fragment)
    pinned = [*pins, *(c.name for c in constraints if isinstance(c, Pin))]
    inputs = {i.name: layout_of(named[i.name], options) for i in graph.inputs_of("input") if not _pinned(i, pinned)}
    inputs.update(_user_inputs(graph, named, options, fragment))
    own = {i.name: layout_of(named[i.name], options) for i in graph.inputs if i.kind in ("parameter", "buffer")}
    return Request(
        train=graph.train,
        input_layouts=inputs,
        output_layouts=_outputs(graph, distributed, options, fragment),
        pins={**pins, **own},
        memory_limit=options.memory_limit,
        objective=options.objective,
        time_limit=options.time_limit,
        constraints=constraints,
        optimizer=options.optimizer,
        cache=options.cache,
        sampled=_sampled(graph, options, fragment, first),
    )


def _sampled(graph: PlanningGraph, options: BackendOptions, fragment: bool, first: bool) -> tuple[WeightedSizes, ...]:
    """The sizes for which to optimise the plan. Warns that the option does not count for a static graph, or for one of several graphs that
    lacks the named dims."""
    if options.example_sizes is None:
        return ()
    dims = () if graph.family is None else graph.family.dims
    try:
        asked = weighted_sizes(options.example_sizes, dims)
    except OptionError as error:
        if dims and not fragment:
            raise
        what = error.what if dims else "its sizes are static"
        log.warning("the option example_sizes does not count for a graph of %d nodes: %s", len(graph.by_name), what)
        return ()
    return sampled_sizes(asked, graph, first=first)


def layout_of(value: torch.Tensor, options: BackendOptions) -> Layout:
    """The layout of a user's tensor on the mesh."""
    return Layout(value.placements) if isinstance(value, DTensor) else Layout.replicated(options.planning_mesh.ndim)


def check_weight_layouts(program: ShardedProgram, named: NamedTensors, options: BackendOptions) -> None:
    """Raises PlanError unless the program reads parameters and buffers in the layouts that they have."""
    for end, layout in zip(program.inputs, program.input_layouts, strict=True):
        if end.kind in ("parameter", "buffer") and layout_of(named[end.name], options) != layout:
            raise PlanError(
                f"{end.kind} {end.name} is {_describe(named[end.name], options)}, the plan reads it in {layout}",
                remedy="plan with the parameters as they are (pins=...), or shard the model by the plan: fxshard.parallelize",
            )


def _check_meshes(named: NamedTensors, options: BackendOptions) -> None:
    for name, value in named.items():
        if isinstance(value, DTensor) and value.device_mesh != options.mesh:
            raise PlanError(
                f"{name} is a DTensor on {value.device_mesh}, the option 'mesh' is {options.mesh}",
                remedy="use one mesh for all: DTensors on the whole mesh that the backend is given",
            )


def _user_pins(graph: PlanningGraph, named: NamedTensors, options: BackendOptions, fragment: bool) -> dict[str, Any]:
    """Pins on values and plain inputs; pins on tensors with a fixed layout are only checked."""
    kept: dict[str, Any] = {}
    for name, layout in (options.pins or {}).items():
        ends = [i for i in graph.inputs if i.name in named and _matches(name, i.name)]
        for end in ends:
            _check_pin(f"pins[{name!r}]", name, layout, end, named[end.name], options)
        if all(_is_plain_input(end, named) for end in ends) and _accept_names((name,), graph, "pins", fragment):
            kept[name] = layout
    return kept


def _user_constraints(graph: PlanningGraph, named: NamedTensors, options: BackendOptions, fragment: bool) -> tuple[Constraint, ...]:
    """The constraints whose names this graph has; also checks pins on tensors with a fixed layout."""
    kept = [c for c in check_constraints(options.constraints) if _accept_names(names_in(c), graph, str(c), fragment)]
    for one in [c for c in kept if isinstance(c, Pin)]:
        for end in [i for i in graph.inputs if i.name in named and _matches(one.name, i.name)]:
            _check_pin(str(one), one.name, one.layout, end, named[end.name], options)
    return tuple(kept)


def _accept_names(given: Sequence[str], graph: PlanningGraph, what: str, fragment: bool) -> bool:
    """Whether to pass the names on to the planner, which raises for a name that matches nothing."""
    names = Names(graph)
    known = [*(i.name for i in graph.inputs), *graph.returned, *(n.name for n in graph.nodes if n.op == "call_function" and outputs_of(n))]
    return all(names.means_something(name) or _accept_name(name, known, what, fragment) for name in given)


def _is_plain_input(end: GraphInput, named: NamedTensors) -> bool:
    return end.kind == "input" and not isinstance(named[end.name], DTensor)


def _check_pin(origin: str, name: str, layout: Any, end: GraphInput, value: torch.Tensor, options: BackendOptions) -> None:
    mesh = options.planning_mesh
    pin = Condition(pattern(layout, mesh, value.dim(), f"{name!r} ({end.name})"), "")
    if isinstance(value, DTensor) or end.kind != "input":
        if pin.admits(layout_of(value, options)):
            return
        raise ConstraintError(
            f"{origin} asks for {end.kind} {end.name} in {layout}, but it is {_describe(value, options)}",
            remedy="torch.compile leaves tensors where they are: distribute it in that layout first "
            "(torch.distributed.tensor.distribute_tensor), or use fxshard.parallelize",
        )


def _describe(value: torch.Tensor, options: BackendOptions) -> str:
    return f"a DTensor in {layout_of(value, options)}" if isinstance(value, DTensor) else "a plain tensor, whole on each rank"


def _pinned(end: GraphInput, pins: Sequence[str]) -> bool:
    return any(_matches(name, end.name) for name in pins)


def _matches(name: str, user: str) -> bool:
    return name == user or fnmatch.fnmatchcase(user, name)


def _accept_name(name: str, names: Sequence[str], what: str, fragment: bool) -> bool:
    """Whether to pass the name on to the planner; False, with a warning, if it matches nothing in one of several graphs."""
    if not fragment or any(_matches(name, n) for n in names):
        return True
    log.warning("%s: %r matches nothing in this graph, one of several of the model%s", what, name, closest(name, names))
    return False


def _user_inputs(graph: PlanningGraph, named: NamedTensors, options: BackendOptions, fragment: bool) -> dict[str, Any]:
    names = [i.name for i in graph.inputs_of("input")]
    given = _by_name(options.input_layouts, [n for n in names if not isinstance(named[n], DTensor)])
    kept = {n: layout for n, layout in given.items() if _accept_name(n, names, "input_layouts", fragment)}
    for end in graph.inputs_of("input"):
        if end.name in kept and isinstance(named[end.name], DTensor):
            _check_pin(f"pins[{end.name!r}]", end.name, kept[end.name], end, named[end.name], options)
    return kept


def _outputs(graph: PlanningGraph, distributed: Sequence[bool], options: BackendOptions, fragment: bool) -> dict[str, Any]:
    whole = Layout.replicated(options.planning_mesh.ndim)
    names = [o.name for o in graph.outputs if o.kind == "output"]
    given = _by_name(options.output_layouts, names)
    plain = {n: whole for n, shared in zip(names, distributed, strict=True) if not shared}
    return {**plain, **{n: layout for n, layout in given.items() if _accept_name(n, names, "output_layouts", fragment)}}


def _by_name(given: Any, names: Iterable[str]) -> dict[str, Any]:
    """Layouts by name; a single layout applies to each of ``names``."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
