"""The planning requests for programs of a parallelized module: the user's options, and the parameters' current layouts."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fxshard.graph.objects import is_length, leaves_in_objects, outputs_in_objects
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request
from fxshard.passes.planning.names import Names, by_end
from fxshard.plans.constraints import Constraint, check_constraints, names_in
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.calls.settings import Settings


@dataclass(frozen=True)
class PlanRequests:
    """Makes the planning requests for programs of ``model``. ``first``: whether it is the first program, which decides the parameters'
    layouts. ``later``: whether other programs exist, so that some of the user's names may be absent from this one."""

    model: nn.Module
    settings: Settings
    mesh: Mesh

    def request(self, graph: PlanningGraph, leaves: Mapping[str, Any], sampled: Any, *, first: bool, later: bool) -> Request:
        """The request for ``graph``, traced from a call of ``leaves``, optimised for the sizes ``sampled``."""
        s = self.settings
        return Request(
            train=graph.train,
            input_layouts=self._input_layouts(graph, leaves, later),
            output_layouts=self._output_layouts(graph, leaves, later),
            pins=self._pins(graph, first),
            memory_limit=s.memory_limit,
            objective=s.objective,
            time_limit=s.time_limit,
            constraints=self._constraints(graph, first),
            optimizer=s.optimizer,
            cache=s.cache,
            sampled=sampled,
        )

    def _input_layouts(self, graph: PlanningGraph, leaves: Mapping[str, Any], later: bool) -> Any:
        """The user's layouts; by default plain inputs are replicated, DTensors keep their layouts."""
        given = self._known_layouts(self.settings.input_layouts, graph, "input", later)
        if given is not None and not isinstance(given, Mapping):
            return given
        whole = Layout.replicated(self.mesh.ndim)
        known = {i.name: leaves[i.name] for i in graph.inputs_of("input") if not is_length(leaves[i.name])}
        default = {n: Layout(x.placements) if isinstance(x, DTensor) else whole for n, x in known.items()}
        return {**default, **(given or {})}

    def _output_layouts(self, graph: PlanningGraph, leaves: Mapping[str, Any], later: bool) -> Any:
        """The user's layouts; by default plain outputs are replicated, and the planner chooses for DTensors, except that an output that
        replaces a DTensor in an object gets its layout."""
        given = self._known_layouts(self.settings.output_layouts, graph, "output", later)
        if given is not None and not isinstance(given, Mapping):
            return given
        inside = {name for i, name in enumerate(leaves) if i in leaves_in_objects(graph.in_spec)}
        distributed = any(isinstance(x, DTensor) for name, x in leaves.items() if name not in inside)
        default: dict[str, Any] = {}
        if not distributed:
            default = {o.name: Layout.replicated(self.mesh.ndim) for o in graph.outputs if o.kind == "output"}
        for name, path in outputs_in_objects(graph.out_spec).items():
            if isinstance(before := leaves.get(path), DTensor):
                default[name] = Layout(before.placements)
        return {**default, **(given or {})} or None

    def requested_outputs(self, graph: PlanningGraph, later: bool) -> frozenset[str]:
        """The names of the outputs whose layouts the user requested by name."""
        given = self._known_layouts(self.settings.output_layouts, graph, "output", later)
        return frozenset(given) if isinstance(given, Mapping) else frozenset()

    def _known_layouts(self, layouts: Any, graph: PlanningGraph, kind: str, later: bool) -> Any:
        """The user's layouts by the names of this graph; for a later program only names that it has."""
        if not isinstance(layouts, Mapping) or set(layouts) <= set(self.mesh.axis_names):
            return layouts
        known = {i.name for i in graph.inputs} | {o.name for o in graph.outputs if o.kind == "output"}
        return {n: layout for n, layout in by_end(layouts, graph, kind).items() if not later or n in known}

    def _pins(self, graph: PlanningGraph, first: bool) -> Any:
        """The user's pins, DTensor parameters in their current layouts, buffers replicated.

        After the first program the parameters' layouts are fixed, and only the user's pins that match a name of this graph stay.
        """
        given = self.settings.pins
        whole = Layout.replicated(self.mesh.ndim)
        known = {i.name for i in graph.inputs} | set(graph.aliases)
        own: dict[str, Any] = {i.name: whole for i in graph.inputs_of("buffer")}
        parameters = {n: p for n, p in self.model.named_parameters(remove_duplicate=False) if n in known}
        own.update({n: Layout(p.placements) for n, p in parameters.items() if isinstance(p, DTensor)})
        if first:
            return given if isinstance(given, ShardingPlan) else {**own, **(given or {})}
        kept = {} if given is None or isinstance(given, ShardingPlan) else given
        others = [i.name for i in graph.inputs if i.kind != "parameter"] + [o.name for o in graph.outputs if o.kind == "output"]
        others += [*graph.returned, *(n.name for n in graph.nodes if n.op == "call_function")]
        return {**{k: v for k, v in kept.items() if k not in parameters and any(fnmatch.fnmatchcase(n, k) for n in others)}, **own}

    def _constraints(self, graph: PlanningGraph, first: bool) -> tuple[Constraint, ...]:
        """The user's constraints; after the first program only those whose names this graph has."""
        given = check_constraints(self.settings.constraints)
        names = Names(graph)
        return given if first else tuple(c for c in given if all(map(names.means_something, names_in(c))))
