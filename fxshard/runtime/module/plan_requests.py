"""The planning requests for programs of a parallelized module: the user's options, and the parameters' current layouts."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import LayoutError, PlanError
from fxshard.graph.objects import is_length, leaves_in_objects, outputs_in_objects
from fxshard.graph.planning_graph import PlanningGraph, operands
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request
from fxshard.passes.planning.constrain import shown_placements
from fxshard.passes.planning.patterns import Pattern
from fxshard.plans.offload import read_offload
from fxshard.plans.parallel import Parallel, of_inputs, read_parallel
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.calls.inputs import layout_of
from fxshard.runtime.calls.request_builder import RequestBuilder
from fxshard.runtime.calls.settings import Settings
from fxshard.runtime.module.parameters import held_layout, held_parameters, offloads_of, with_held
from fxshard.runtime.module.shard_arguments import ShardArguments

MODE_NAMES = {True: "training", False: "inference"}


@dataclass(frozen=True)
class PlanRequests:
    """Makes the planning requests for programs of ``model``. ``first``: whether it is the first program, which decides the parameters'
    layouts and must have all of the user's names; other programs may lack some. ``open_parameters``: ids of DTensors that it may move."""

    model: nn.Module
    settings: Settings
    mesh: Mesh
    shards: ShardArguments
    open_parameters: frozenset[int]

    def request(self, graph: PlanningGraph, leaves: Mapping[str, Any], sampled: Any, *, first: bool) -> Request:
        """The request for ``graph``, traced from a call of ``leaves``, optimised for the sizes ``sampled``.

        By default inputs keep their layouts: plain tensors are replicated.
        """
        builder = self._builder(graph, first)
        given = {i.name: x for i in graph.inputs_of("input") if not is_length(x := leaves[i.name])}
        said = of_inputs(self.parallel, {name: tuple(x.shape) for name, x in given.items()})
        inputs: dict[str, Any] = {name: layout_of(x, self.mesh) for name, x in given.items()}
        whole = dict.fromkeys(self.mesh.axis_names, Replicate())
        inputs.update({name: {**whole, **said[name]} for name, x in given.items() if said[name] and not isinstance(x, DTensor)})
        request = builder.request(inputs, self._outputs(graph, leaves, first), self._pins(builder, first), sampled, leaves)
        offload = read_offload(self.settings.offload) if first else offloads_of(self.model)
        return replace(request, parallel=self.parallel, offload=offload)

    @cached_property
    def parallel(self) -> Parallel:
        return read_parallel(self.settings.parallel, self.mesh)

    def shown_placements(self, graph: PlanningGraph, leaves: Mapping[str, Any], first: bool) -> dict[str, Pattern]:
        """What outputs show on axes of one rank."""
        return shown_placements(graph, self.mesh, self._builder(graph, first).outputs_with(self._outputs(graph, leaves, first)))

    def requested_outputs(self, graph: PlanningGraph, first: bool) -> frozenset[str]:
        """The names of the outputs whose layouts the user requested by name."""
        given = self._builder(graph, first).asked("output")
        return frozenset(given) if isinstance(given, Mapping) else frozenset()

    def _builder(self, graph: PlanningGraph, first: bool) -> RequestBuilder:
        return RequestBuilder(self.settings, graph, self.mesh, "raise" if first else "skip")

    def _outputs(self, graph: PlanningGraph, leaves: Mapping[str, Any], first: bool) -> dict[str, Layout | dict[str, Placement]]:
        """By default plain outputs are replicated; the planner chooses for DTensors, except that an output that replaces a DTensor in an
        object gets its layout. Of shards that styles return, the rank has the rows of the DTensors that it passed, on axes of which the
        styles say nothing."""
        inside = {name for i, name in enumerate(leaves) if i in leaves_in_objects(graph.in_spec)}
        passed = [x for name, x in leaves.items() if isinstance(x, DTensor) and name not in inside and name not in self.shards.layouts]
        returned = operands(graph.module.graph.output_node())
        shapes = {o.name: tuple(node.meta["val"].shape) for o, node in zip(graph.outputs, returned, strict=True) if o.name in graph.forms}
        default: dict[str, Layout | dict[str, Placement]] = {}
        said = self._builder(graph, first).asked("output")
        by_name = said is None or (isinstance(said, Mapping) and not set(said) <= set(self.mesh.axis_names))
        for name, form in graph.forms.items() if by_name else ():
            axes = [axis for axis in self.mesh.axis_names if axis not in (form.placements or {})]
            if form.kind == "local" and axes and name not in (said or ()):
                default[name] = {axis: self._rows(name, axis, shapes[name], passed) for axis in axes}
        if not passed:
            default |= {
                o.name: Layout.replicated(self.mesh.ndim) for o in graph.outputs if o.kind == "output" and o.name not in graph.forms
            }
        for name, path in outputs_in_objects(graph.out_spec).items():
            if isinstance(before := leaves.get(path), DTensor):
                default[name] = Layout(before.placements)
        return default

    def _rows(self, name: str, axis: str, shape: Sequence[int], passed: Sequence[DTensor]) -> Placement:
        """The placement on ``axis`` of the result ``name``: that of the first of ``passed`` that is sharded there, along the dim of its
        size, or dim 0 if it is flattened from such rows. Raises LayoutError if there is no such dim; a scalar is whole."""
        ranks = self.mesh.shape[self.mesh.axis(axis)]
        for one in passed:
            placement = layout_of(one, self.mesh)[self.mesh.axis(axis)]
            if not isinstance(placement, Shard) or not shape:
                continue
            dim, size = placement.dim, one.shape[placement.dim]
            if dim < len(shape) and shape[dim] == size:
                return Shard(dim)
            if dim == 0 and size and shape[0] % size == 0 and size % ranks == 0:
                return Shard(0)
            what = (
                f"{name} is returned as this rank's part, and none of its dims is dim {dim} of a DTensor that was passed, {size} on {axis}"
            )
            raise LayoutError(what, remedy=f"say its layout: output_layouts={{{name!r}: {{{axis!r}: Shard(...)}}}}, or Replicate()")
        return Replicate()

    def _pins(self, builder: RequestBuilder, first: bool) -> Any:
        """The user's pins, DTensor parameters in their current layouts, buffers replicated.

        After the first program the parameters' layouts are fixed, and only the user's pins that match a name of this graph stay.
        """
        graph, given = builder.graph, self.settings.pins
        own: dict[str, Any] = {i.name: Layout.replicated(self.mesh.ndim) for i in graph.inputs_of("buffer")}
        held = held_parameters(self.model, graph)
        own.update({n: held_layout(p, movable=first) for n, p in held.items() if not (first and id(p) in self.open_parameters)})
        if first:
            return given if isinstance(given, ShardingPlan) else with_held(own, given or {}, graph)
        kept = {} if given is None or isinstance(given, ShardingPlan) else given
        others = [*(i.name for i in graph.inputs if i.kind != "parameter"), *builder.outputs]
        others += [*graph.returned, *(n.name for n in graph.nodes if n.op == "call_function")]

        def counts(name: str) -> bool:
            known = any(fnmatch.fnmatchcase(other, name) for other in others) or builder.names.names_inputs(name)
            return known and name not in held

        return {**{k: v for k, v in kept.items() if counts(k)}, **own}


def mode_of(train: bool | None, plan: ShardingPlan | None) -> bool:
    """Whether the first program trains; raises PlanError if ``train`` contradicts the plan."""
    if plan is None:
        return True if train is None else train
    if train is not None and train != plan.train:
        what = f"the plan is for {MODE_NAMES[plan.train]}, train={train} asks for {MODE_NAMES[bool(train)]}"
        raise PlanError(what, remedy=f"plan with train={train}, or leave train out: the first program is then the plan's")
    return plan.train
