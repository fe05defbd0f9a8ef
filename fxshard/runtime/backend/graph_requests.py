"""What the planner is asked for one graph of the backend: tensors as the user holds them, then the user's own wishes."""

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
from fxshard.plans.constraints import Constraint, Pin, names_in
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.options import BackendOptions
from fxshard.runtime.module.several_sizes import sampled_sizes
from fxshard.shapes import WeightedSizes, weighted_sizes

log = logging.getLogger("fxshard")

Held = Mapping[str, torch.Tensor]
"""The user's tensors by the names of the graph's inputs."""


def request_of(graph: PlanningGraph, held: Held, distributed: Sequence[bool], options: BackendOptions, part: bool, first: bool) -> Request:
    """Plain tensors replicated and DTensors as they lie; outputs replicated where the user sees a plain tensor; then the
    user's layouts and pins. ``distributed``: for each output whether it is a DTensor.

    ``first``: whether nothing was planned for this graph of Dynamo's. A name that means nothing here is an error, or a warning where the
    model broke into several graphs (``part``).
    Raises ConstraintError for a pin that contradicts how a tensor lies, PlanError for a DTensor on another mesh.
    """
    _check_meshes(held, options)
    pins, constraints = _user_pins(graph, held, options, part), _user_constraints(graph, held, options, part)
    pinned = [*pins, *(c.name for c in constraints if isinstance(c, Pin))]
    inputs = {i.name: layout_of(held[i.name], options) for i in graph.inputs_of("input") if not _pinned(i, pinned)}
    inputs.update(_user_inputs(graph, held, options, part))
    own = {i.name: layout_of(held[i.name], options) for i in graph.inputs if i.kind in ("parameter", "buffer")}
    return Request(
        train=graph.train,
        input_layouts=inputs,
        output_layouts=_outputs(graph, distributed, options, part),
        pins={**pins, **own},
        memory_limit=options.memory_limit,
        objective=options.objective,
        time_limit=options.time_limit,
        constraints=constraints,
        optimizer=options.optimizer,
        cache=options.cache,
        sampled=_sampled(graph, options, part, first),
    )


def _sampled(graph: PlanningGraph, options: BackendOptions, part: bool, first: bool) -> tuple[WeightedSizes, ...]:
    """The sizes at which the plan is to be good. Of a graph whose sizes are numbers, and of one of several graphs that has no such dims, it
    is said that they do not count."""
    if options.example_sizes is None:
        return ()
    dims = () if graph.family is None else graph.family.dims
    try:
        asked = weighted_sizes(options.example_sizes, dims)
    except OptionError as error:
        if dims and not part:
            raise
        what = error.what if dims else "its sizes are static"
        log.warning("the option example_sizes does not count for a graph of %d nodes: %s", len(graph.by_name), what)
        return ()
    return sampled_sizes(asked, graph, first=first)


def layout_of(value: torch.Tensor, options: BackendOptions) -> Layout:
    """How a tensor of the user lies on the mesh."""
    return Layout(value.placements) if isinstance(value, DTensor) else Layout.replicated(options.planning_mesh.ndim)


def check_held(program: ShardedProgram, held: Held, options: BackendOptions) -> None:
    """Raises PlanError unless the program reads parameters and buffers as the user holds them."""
    for end, layout in zip(program.inputs, program.input_layouts, strict=True):
        if end.kind in ("parameter", "buffer") and layout_of(held[end.name], options) != layout:
            raise PlanError(
                f"{end.kind} {end.name} is {_describe(held[end.name], options)}, the plan reads it in {layout}",
                remedy="plan with the parameters as they are (pins=...), or shard the model by the plan: fxshard.parallelize",
            )


def _check_meshes(held: Held, options: BackendOptions) -> None:
    for name, value in held.items():
        if isinstance(value, DTensor) and value.device_mesh != options.mesh:
            raise PlanError(
                f"{name} is a DTensor on {value.device_mesh}, the option 'mesh' is {options.mesh}",
                remedy="use one mesh for all: DTensors on the whole mesh that the backend is given",
            )


def _user_pins(graph: PlanningGraph, held: Held, options: BackendOptions, part: bool) -> dict[str, Any]:
    """Pins on values and plain inputs; those on tensors that lie already are only checked."""
    kept: dict[str, Any] = {}
    for name, layout in (options.pins or {}).items():
        ends = [i for i in graph.inputs if i.name in held and _means(name, i.name)]
        for end in ends:
            _check_pin(f"pins[{name!r}]", name, layout, end, held[end.name], options)
        if all(_free(end, held) for end in ends) and _all_known((name,), graph, "pins", part):
            kept[name] = layout
    return kept


def _user_constraints(graph: PlanningGraph, held: Held, options: BackendOptions, part: bool) -> tuple[Constraint, ...]:
    """Those that mean something here; of pins, those on tensors that lie already are checked."""
    kept = [c for c in options.constraints if _all_known(names_in(c), graph, str(c), part)]
    for one in [c for c in kept if isinstance(c, Pin)]:
        for end in [i for i in graph.inputs if i.name in held and _means(one.name, i.name)]:
            _check_pin(str(one), one.name, one.layout, end, held[end.name], options)
    return tuple(kept)


def _all_known(given: Sequence[str], graph: PlanningGraph, what: str, part: bool) -> bool:
    """Whether names go on to the planner, which refuses what matches nothing."""
    names = Names(graph)
    known = [*(i.name for i in graph.inputs), *graph.returned, *(n.name for n in graph.nodes if n.op == "call_function" and outputs_of(n))]
    return all(names.means_something(name) or _known(name, known, what, part) for name in given)


def _free(end: GraphInput, held: Held) -> bool:
    return end.kind == "input" and not isinstance(held[end.name], DTensor)


def _check_pin(said: str, name: str, layout: Any, end: GraphInput, value: torch.Tensor, options: BackendOptions) -> None:
    mesh = options.planning_mesh
    pin = Condition(pattern(layout, mesh, value.dim(), f"{name!r} ({end.name})"), "")
    if isinstance(value, DTensor) or end.kind != "input":
        if pin.admits(layout_of(value, options)):
            return
        raise ConstraintError(
            f"{said} asks for {end.kind} {end.name} in {layout}, but it is {_describe(value, options)}",
            remedy="torch.compile leaves tensors where they are: distribute it in that layout first "
            "(torch.distributed.tensor.distribute_tensor), or use fxshard.parallelize",
        )


def _describe(value: torch.Tensor, options: BackendOptions) -> str:
    return f"a DTensor in {layout_of(value, options)}" if isinstance(value, DTensor) else "a plain tensor, whole on each rank"


def _pinned(end: GraphInput, pins: Sequence[str]) -> bool:
    return any(_means(name, end.name) for name in pins)


def _means(name: str, user: str) -> bool:
    return name == user or fnmatch.fnmatchcase(user, name)


def _known(name: str, names: Sequence[str], what: str, part: bool) -> bool:
    """Whether a name goes on to the planner, which refuses what matches nothing."""
    if not part or any(_means(name, n) for n in names):
        return True
    log.warning("%s: %r matches nothing in this graph, one of several of the model%s", what, name, closest(name, names))
    return False


def _user_inputs(graph: PlanningGraph, held: Held, options: BackendOptions, part: bool) -> dict[str, Any]:
    names = [i.name for i in graph.inputs_of("input")]
    given = _named(options.input_layouts, [n for n in names if not isinstance(held[n], DTensor)])
    kept = {n: layout for n, layout in given.items() if _known(n, names, "input_layouts", part)}
    for end in graph.inputs_of("input"):
        if end.name in kept and isinstance(held[end.name], DTensor):
            _check_pin(f"pins[{end.name!r}]", end.name, kept[end.name], end, held[end.name], options)
    return kept


def _outputs(graph: PlanningGraph, distributed: Sequence[bool], options: BackendOptions, part: bool) -> dict[str, Any]:
    whole = Layout.replicated(options.planning_mesh.ndim)
    names = [o.name for o in graph.outputs if o.kind == "output"]
    given = _named(options.output_layouts, names)
    plain = {n: whole for n, shared in zip(names, distributed, strict=True) if not shared}
    return {**plain, **{n: layout for n, layout in given.items() if _known(n, names, "output_layouts", part)}}


def _named(given: Any, names: Iterable[str]) -> dict[str, Any]:
    """Layouts by name; one layout for all is one for each of ``names``."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
