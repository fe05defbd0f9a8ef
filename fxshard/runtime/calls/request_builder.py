"""RequestBuilder: the planning request for one graph, from the user's options and the layouts that hold where these say nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch.distributed.tensor import DTensor

from fxshard.errors import closest
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request
from fxshard.passes.planning.names import Names, by_end
from fxshard.plans.constraints import Constraint, check_constraints, names_in
from fxshard.runtime.calls.options import Options
from fxshard.shapes import WeightedSizes

log = logging.getLogger("fxshard")

Layouts = Mapping[str, Any]


@dataclass(frozen=True)
class RequestBuilder:
    """``unknown``: what happens to an option for a name that the graph lacks: the planner raises ConstraintError for it, or the option does
    not count for this graph, with a warning or without."""

    options: Options
    graph: PlanningGraph
    mesh: Mesh
    unknown: Literal["raise", "warn", "skip"]

    def request(
        self, inputs: Layouts, outputs: Layouts, pins: Any, sampled: tuple[WeightedSizes, ...], given: Mapping[str, Any]
    ) -> Request:
        """The request. ``inputs``, ``outputs``: the layouts of those that the user's do not name; ``sampled``: the sizes for which to
        optimise the plan; ``given``: the arguments by name."""
        plain = {i.name for i in self.graph.inputs_of("input") if not isinstance(given[i.name], DTensor)}
        o = self.options
        return Request(
            train=self.graph.train,
            input_layouts=_merged(inputs, self.asked("input")),
            output_layouts=self.outputs_with(outputs),
            pins=pins,
            memory_limit=o.memory_limit,
            objective=o.objective,
            time_limit=o.time_limit,
            constraints=self.constraints,
            optimizer=o.optimizer,
            cache=o.cache,
            sampled=sampled,
            returned_whole=frozenset(end.name for end in self.graph.outputs if end.kind != "output" and end.name in plain),
        )

    def outputs_with(self, default: Layouts) -> Any:
        """The user's layouts of outputs, and ``default`` of those that they do not name."""
        return _merged(default, self.asked("output"))

    def asked(self, kind: Literal["input", "output"]) -> Any:
        """The user's layouts of the inputs or outputs, by the names that this graph has; other forms unchanged."""
        given = self.options.input_layouts if kind == "input" else self.options.output_layouts
        if not isinstance(given, Mapping) or set(given) <= set(self.mesh.axis_names):
            return given
        ends = [i.name for i in self.graph.inputs_of("input")] if kind == "input" else self.outputs
        return {name: layout for name, layout in by_end(given, self.graph, kind).items() if self.counts(f"{kind}_layouts", (name,), ends)}

    @cached_property
    def outputs(self) -> list[str]:
        return [o.name for o in self.graph.outputs if o.kind == "output"]

    @cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """The user's constraints that count for this graph."""
        return tuple(c for c in check_constraints(self.options.constraints) if self.counts(str(c), names_in(c)))

    def counts(self, what: str, names: Sequence[str], known: Collection[str] | None = None) -> bool:
        """Whether to pass on to the planner what the user asks of ``names``; ``known``: by default all names of the graph."""
        if self.unknown == "raise":
            return True
        lost = [name for name in names if not (self.names.means_something(name) if known is None else name in known)]
        if lost and self.unknown == "warn":
            text = "%s: %r matches nothing in this graph, one of several of the model%s"
            log.warning(text, what, lost[0], closest(lost[0], self.names.all if known is None else known))
        return not lost

    @cached_property
    def names(self) -> Names:
        return Names(self.graph)


def _merged(default: Layouts, given: Any) -> Any:
    return {**default, **(given or {})} if isinstance(given, Mapping | None) else given
