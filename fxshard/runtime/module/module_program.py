"""A program of a parallelized module, and the calls that it serves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from torch import nn

from fxshard._torch_compat import pytree
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.graph.side_effects import Attribute
from fxshard.runtime.calls.after_run import AfterRun, after_run_of
from fxshard.runtime.calls.attributes import Attributes, changed_attributes
from fxshard.runtime.calls.dynamic_sizes import Shapes
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.module.module_state import Hooks, same_hooks


@dataclass(frozen=True)
class ModuleProgram:
    """A program and what it was made for: the structure of the arguments, their shapes, the modules' attributes and hooks.

    ``after``: what to do after a run. ``unread``: (module, attribute) pairs whose changes proved not to change the graph; never
    ``training``, which must match exactly.
    """

    spec: pytree.TreeSpec
    attributes: Attributes
    runner: Runner
    graph: PlanningGraph
    shapes: Shapes
    hooks: Hooks
    after: AfterRun
    unread: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.graph.side_effects is not None:
            self.unread.update(self.graph.side_effects.unread)

    def serves(self, spec: pytree.TreeSpec, now: Attributes, hooks: Hooks) -> bool:
        """Whether the program serves a call of this structure with these attributes and hooks, if its sizes fit."""
        return (
            self.spec == spec and same_hooks(self.hooks, hooks) and self.after.still_valid and self.changed_attributes(now) <= self.unread
        )

    def has(self, graph: PlanningGraph) -> bool:
        """Whether it is a program of this graph."""
        program = self.runner.program
        return program.plan.graph_hash == graph.hash and program.out_spec == graph.out_spec

    def changed_attributes(self, now: Attributes) -> set[Attribute]:
        """The attributes that differ from those that the program was made for."""
        return changed_attributes(self.attributes, now, self.graph.fixed)

    def extended_to(
        self, now: Attributes, hooks: Hooks, after: AfterRun, graph: PlanningGraph, written: Collection[Attribute]
    ) -> ModuleProgram:
        """The same program for other attributes and hooks, for which tracing gave the same ``graph``.

        That proves nothing about attributes that are ``written``, by calls or between them: two values of a counter may give the same
        graph, and a third value another graph.
        """
        if graph.side_effects != self.graph.side_effects:
            return replace(self, attributes=now, hooks=hooks, after=after, graph=graph, unread=set())
        if same_hooks(self.hooks, hooks):
            kept = {*written, *self.graph.fixed}
            self.unread.update((i, name) for i, name in self.changed_attributes(now) if name != "training" and (i, name) not in kept)
        return replace(self, attributes=now, hooks=hooks, after=after)

    def copied_to(self, model: nn.Module) -> ModuleProgram:
        """The same program for ``model``, a copy of the module that it was made for."""
        runner = replace(self.runner, model=model)
        return replace(self, runner=runner, after=after_run_of(model, self.graph, runner.bound.device), unread=set(self.unread))
