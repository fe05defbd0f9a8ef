"""Hooks of submodules that no graph can do, called after the program with the values that they would have seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import versions_of
from fxshard._torch_compat.hooks import Hook, global_hooks, has_gradient_hooks, hooks_of
from fxshard.errors import RunError
from fxshard.passes.hooks import described
from fxshard.planning_graph import Watched


@dataclass(frozen=True)
class HookCall:
    """``opaque``: why the hook is in no graph; "" where the graph has what it computes, and only the rest is done here."""

    module: nn.Module
    name: str
    hook: Hook
    opaque: str

    def __call__(self, given: Sequence[Any]) -> None:
        """Raises RunError where the hook does what could not have an effect any more."""
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
        before, held = versions_of(tensors), self._held()
        result = self.hook.call(self.module, *given)
        if result is not None and self.opaque:
            raise self._error(f"returns {type(result).__name__}, but could not be captured: {self.opaque}", "return nothing from it")
        if versions_of(tensors) != before:
            raise self._error("changes a tensor in place, after the program that it was to have an effect on", "return a new value")
        if self._held() != held:
            raise self._error("changes a parameter or buffer, and something that is in no graph", "make two hooks of it")
        if any(map(has_gradient_hooks, tensors)):
            raise self._error(
                "asks for the gradient of a value (register_hook, retain_grad), which is the program's own",
                "compute it by torch.autograd.grad of an output",
            )

    def _held(self) -> list[tuple[int, int]]:
        """The module's parameters and buffers, and how often each was written into."""
        found = [*self.module.parameters(), *self.module.buffers()]
        return [(id(x), version) for x, version in zip(found, versions_of(found), strict=True)]

    def _error(self, what: str, instead: str) -> RunError:
        remedy = f"{instead}, or register it on the parallelized module itself, whose hooks run around the program"
        return RunError(f"{described(self.hook, self.name)} {what}", where=self.name, remedy=remedy)


def hook_calls(model: nn.Module, watched: Sequence[Watched] | None) -> tuple[HookCall, ...] | None:
    """The hooks that hang on ``model`` now; None for a program that returns what the model returns and no more."""
    if watched is None:
        return None
    everywhere = {hook.key: hook for hook in global_hooks()}
    found = []
    for call in watched:
        module = model.get_submodule(call.module)
        own = {hook.key: hook for hook in hooks_of(module)}
        found.append(HookCall(module, call.module, own.get(call.key) or everywhere[call.key], call.opaque))
    return tuple(found)


def call_hooks(calls: tuple[HookCall, ...] | None, result: Any) -> Any:
    """What the model returns, the hooks having been called with the rest of what its program returned."""
    if calls is None:
        return result
    outputs, given = result
    for call, values in zip(calls, given, strict=True):
        call(values)
    return outputs
