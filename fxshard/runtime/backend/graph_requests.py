"""The planning request for one graph of the backend: the layouts of the user's tensors, and the user's options."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fxshard.errors import ConstraintError, OptionError, PlanError
from fxshard.graph.planning_graph import GraphInput, PlanningGraph, example_shape
from fxshard.layout.layouts import Layout, placement_str, same_layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request
from fxshard.passes.planning.patterns import Condition, pattern
from fxshard.plans.constraints import Held, Pin
from fxshard.plans.parallel import of_inputs
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.backend.backend_options import BackendOptions
from fxshard.runtime.calls.inputs import layout_of
from fxshard.runtime.calls.request_builder import RequestBuilder
from fxshard.runtime.module.parameters import held_layout
from fxshard.runtime.module.several_sizes import sampled_sizes
from fxshard.shapes import WeightedSizes, weighted_sizes

log = logging.getLogger("fxshard")

DISTRIBUTE = (
    "torch.compile leaves tensors where they are: distribute it in that layout first (torch.distributed.tensor.distribute_tensor), "
    "or use fxshard.parallelize"
)

NamedTensors = Mapping[str, torch.Tensor]
"""The user's tensors by the names of the graph's inputs."""


@dataclass(frozen=True)
class Returned:
    """How an output is returned: whether as a DTensor, and in which layout; None if the plan chooses it."""

    distributed: bool
    layout: Layout | None = None


def request_of(
    graph: PlanningGraph, named: NamedTensors, returned: Sequence[Returned], options: BackendOptions, fragment: bool, first: bool
) -> Request:
    """The request: plain tensors replicated, DTensors in their layouts, outputs as in eager execution, then the user's layouts and pins.

    ``returned``: how each output is returned. ``first``: whether this is the first program of the Dynamo graph. A name
    that matches nothing here is an error, or only a warning if the graph is one of several of the model (``fragment``).
    Raises ConstraintError for a pin that contradicts the layout of a tensor, PlanError for a DTensor on another mesh.
    """
    _check_meshes(named, options)
    if not isinstance(options.input_layouts, Mapping | None):  # one layout for all plain inputs
        plain = [i.name for i in graph.inputs_of("input") if not isinstance(named[i.name], DTensor)]
        options = replace(options, input_layouts=dict.fromkeys(plain, options.input_layouts))
    return _GraphRequest(options, graph, options.planning_mesh, "warn" if fragment else "raise", named).of(returned, first)


def check_weight_layouts(program: ShardedProgram, named: NamedTensors, mesh: Mesh) -> None:
    """Raises PlanError unless the program reads parameters and buffers in the layouts that they have."""
    for end, layout in zip(program.inputs, program.input_layouts, strict=True):
        if end.kind in ("parameter", "buffer") and not same_layout(layout_of(named[end.name], mesh), layout, mesh.shape):
            raise PlanError(
                f"{end.kind} {end.name} is {_describe(named[end.name], mesh)}, the plan reads it in {layout}",
                remedy="plan with the parameters as they are (pins=...), or shard the model by the plan: fxshard.parallelize",
            )


def _check_meshes(named: NamedTensors, options: BackendOptions) -> None:
    for name, value in named.items():
        if isinstance(value, DTensor) and value.device_mesh != options.mesh:
            raise PlanError(
                f"{name} is a DTensor on {value.device_mesh}, the option 'mesh' is {options.mesh}",
                remedy="use one mesh for all: DTensors on the whole mesh that the backend is given",
            )


@dataclass(frozen=True)
class _GraphRequest(RequestBuilder):
    """The request for a graph of the tensors ``named``, of which parameters, buffers and DTensors stay in their layouts."""

    options: BackendOptions
    named: NamedTensors

    def of(self, returned: Sequence[Returned], first: bool) -> Request:
        user_pins = self.options.pins or {}
        self._check_fixed((f"pins[{name!r}]", name, layout) for name, layout in user_pins.items())
        opened = {name: layout for name, layout in user_pins.items() if not any(map(self._is_fixed, self._ends(name)))}
        pins = {name: layout for name, layout in opened.items() if self.counts("pins", (name,))}
        constraints = [c for c in self.constraints if isinstance(c, Pin)]
        self._check_fixed((str(c), c.name, c.layout) for c in constraints)
        pinned = [*pins, *(c.name for c in constraints)]
        inputs = {i.name: self._layout(i) for i in self.graph.inputs_of("input") if not any(_matches(name, i.name) for name in pinned)}
        whole = Layout.replicated(self.mesh.ndim)
        given = zip(self.outputs, returned, strict=True)
        outputs = {name: layout for name, one in given if (layout := one.layout if one.distributed else whole) is not None}
        inputs |= self._worded([name for name in inputs if not isinstance(self.named[name], DTensor)])
        self._check_worded()
        own = {i.name: self._own(i) for i in self.graph.inputs if i.kind in ("parameter", "buffer")}
        request = self.request(inputs, outputs, {**pins, **own}, self._sampled(first), self.named)
        self._check_fixed((f"input_layouts[{name!r}]", name, layout) for name, layout in request.input_layouts.items())
        return replace(request, parallel=self.options.words)

    def _worded(self, names: Sequence[str]) -> dict[str, Any]:
        """The layouts that one-word plans give to plain inputs: whole on the axes without one."""
        said = of_inputs(self.options.words, {name: example_shape(self._value(name).shape) for name in names})
        whole = dict.fromkeys(self.mesh.axis_names, Replicate())
        return {name: {**whole, **placements} for name, placements in said.items() if placements}

    def _check_worded(self) -> None:
        """Raises ConstraintError for a parameter that a one-word plan shards, but that is whole."""
        for axis, word in self.options.words.items():
            for end in self.graph.inputs_of("parameter"):
                shape, have = example_shape(self._value(end.name).shape), self._layout(end)
                wanted = word.parameter(end.name, shape)
                others = word.beside(end.name, shape)
                asked_for = Condition(pattern({axis: wanted}, self.mesh, len(shape), end.name), "", beside=others)
                index = self.mesh.axis(axis)
                whole = have[index] == Replicate() and self.mesh.shape[index] > 1
                if not asked_for.admits(have) or (word.is_never_whole(end.name, shape) and whole):
                    asked = "sharded" if wanted is None else f"in {placement_str(wanted)}"
                    if others and self.mesh.ndim > 1:
                        asked += f" (or, where another axis shards that dim, in {' or '.join(map(placement_str, others))})"
                    what = f"parallel={{{axis!r}: {word.said_of(end.name)}}} asks for parameter {end.name} {asked} on {axis!r}"
                    raise ConstraintError(f"{what}, but it is {_describe(self.named[end.name], self.mesh)}", remedy=DISTRIBUTE)

    def _value(self, name: str) -> torch.Tensor:
        value: torch.Tensor = next(self.graph.by_name[i.node] for i in self.graph.inputs if i.name == name).meta["val"]
        return value

    def _sampled(self, first: bool) -> tuple[WeightedSizes, ...]:
        """The sizes for which to optimise the plan. Warns that the option does not count for a static graph, or for one of several graphs
        that lacks the named dims."""
        if self.options.example_sizes is None:
            return ()
        dims = () if self.graph.family is None else self.graph.family.dims
        try:
            asked = weighted_sizes(self.options.example_sizes, dims)
        except OptionError as error:
            if dims and self.unknown == "raise":
                raise
            what = error.what if dims else "its sizes are static"
            log.warning("the option example_sizes has no effect on a graph of %d nodes: %s", len(self.graph.by_name), what)
            return ()
        return sampled_sizes(asked, self.graph, first=first)

    def _layout(self, end: GraphInput) -> Layout:
        return layout_of(self.named[end.name], self.mesh)

    def _own(self, end: GraphInput) -> Layout | Held:
        value = self.named[end.name]
        return held_layout(value, movable=False) if isinstance(value, DTensor) else self._layout(end)

    def _is_fixed(self, end: GraphInput) -> bool:
        return end.kind != "input" or isinstance(self.named[end.name], DTensor)

    def _ends(self, name: str) -> list[GraphInput]:
        """The user's tensors that a name or glob matches."""
        return [i for i in self.graph.inputs if i.name in self.named and _matches(name, i.name)]

    def _check_fixed(self, pins: Iterable[tuple[str, str, Any]]) -> None:
        """Raises ConstraintError for a pin (the user's text, name, layout) that contradicts the fixed layout of a tensor."""
        for text, name, layout in pins:
            for end in filter(self._is_fixed, self._ends(name)):
                value = self.named[end.name]
                pin = Condition(pattern(layout, self.mesh, value.dim(), f"{name!r} ({end.name})"), "")
                if not pin.admits(self._layout(end)):
                    raise ConstraintError(
                        f"{text} asks for {end.kind} {end.name} in {layout}, but it is {_describe(value, self.mesh)}",
                        remedy=DISTRIBUTE,
                    )


def _describe(value: torch.Tensor, mesh: Mesh) -> str:
    return f"a DTensor in {layout_of(value, mesh)}" if isinstance(value, DTensor) else "a plain tensor, whole on each rank"


def _matches(name: str, user: str) -> bool:
    return name == user or fnmatch.fnmatchcase(user, name)
