"""A program of a parallelized module, and which calls it serves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from fxshard._torch_compat import pytree
from fxshard.planning_graph import PlanningGraph
from fxshard.runtime.any_size import Shapes
from fxshard.runtime.attributes import Attributes, differing
from fxshard.runtime.called_hooks import HooksAfter, hooks_after
from fxshard.runtime.module_state import Hooks, same_hooks
from fxshard.runtime.runner import Runner


@dataclass(frozen=True)
class Made:
    """A program that was made, and for what: the structure of the arguments, their shapes, the modules' attributes and hooks.

    ``unread``: (module, attribute) whose changes were found to leave its graph as it is; never ``training``, for which a
    program is looked up exactly. ``ranks_alike``: whether all ranks' programs take the same for granted of dynamic sizes.
    """

    spec: pytree.TreeSpec
    attributes: Attributes
    runner: Runner
    graph: PlanningGraph
    shapes: Shapes
    hooks: Hooks
    after: HooksAfter
    ranks_alike: bool
    unread: set[tuple[int, str]] = field(default_factory=set)

    def serves(self, spec: pytree.TreeSpec, now: Attributes, hooks: Hooks) -> bool:
        return self.spec == spec and same_hooks(self.hooks, hooks) and differing(self.attributes, now) <= self.unread

    def also_for(self, now: Attributes, hooks: Hooks, after: HooksAfter) -> Made:
        """The same program for other attributes and hooks, its graph having been found to be the same."""
        if same_hooks(self.hooks, hooks):
            self.unread.update((i, name) for i, name in differing(self.attributes, now) if name != "training")
        return replace(self, attributes=now, hooks=hooks, after=after)

    def moved(self, model: nn.Module) -> Made:
        """The same program for a copy of the module that it was made for."""
        runner = Runner(model, self.runner.compiled, list(self.runner.leaf_of), self.runner.timeout, self.runner.cut)
        return replace(self, runner=runner, after=hooks_after(model, self.graph, runner.bound.device), unread=set(self.unread))
