"""What happens after a program has run: module attributes are set, and hooks that no graph can contain are called.

The hooks get the values that they would have seen in the original model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import versions_of
from fxshard._torch_compat.dynamo.hooks import BACKWARD, BACKWARD_PRE, Hook, global_hooks, has_gradient_hooks, hooks_of
from fxshard.errors import RunError
from fxshard.graph.planning_graph import PlanningGraph, TappedCall, Watched
from fxshard.graph.side_effects import SideEffects
from fxshard.passes.trace.python_state.gradient_taps import tap_name
from fxshard.passes.trace.python_state.hooks import described
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.inputs import Leaves
from fxshard.runtime.calls.runner import Runner
from fxshard.shapes import evaluate_all


@dataclass(frozen=True)
class HookCall:
    """A hook to call after a run. ``opaque``: why the graph cannot contain it; "" if the graph computes its tensors and only its other
    effects remain to be done."""

    module: nn.Module
    name: str
    hook: Hook
    opaque: str

    def __call__(self, given: Sequence[Any]) -> None:
        """Calls the hook; raises RunError if the hook does something that has no effect after the run."""
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
        before, held = versions_of(tensors), self._held()
        result = self.hook.call(self.module, *given)
        if result is not None and self.opaque:
            raise self._error(f"returns {type(result).__name__}, but could not be captured: {self.opaque}", "return nothing from it")
        if versions_of(tensors) != before:
            raise self._error("changes a tensor in place, but the program that should see the change has already run", "return a new value")
        if self._held() != held:
            raise self._error("changes a parameter or buffer, and also something that no graph contains", "split it into two hooks")
        if any(map(has_gradient_hooks, tensors)):
            raise self._error(
                "asks for the gradient of a value (register_hook, retain_grad) that is internal to the program",
                "compute the gradient with torch.autograd.grad of an output",
            )

    def _held(self) -> list[tuple[int, int]]:
        """(identity, version) of the module's parameters and buffers."""
        found = [*self.module.parameters(), *self.module.buffers()]
        return [(id(x), version) for x, version in zip(found, versions_of(found), strict=True)]

    def _error(self, what: str, instead: str) -> RunError:
        remedy = f"{instead}, or register it on the parallelized module itself, whose hooks run around the program"
        return RunError(f"{described(self.hook, self.name)} {what}", where=self.name, remedy=remedy)


def _hook_calls(model: nn.Module, watched: Sequence[Watched] | None) -> tuple[HookCall, ...] | None:
    """The calls of the hooks that ``model`` has now; None for a program without values for hooks among its outputs."""
    if watched is None:
        return None
    everywhere = {hook.key: hook for hook in global_hooks()}
    found = []
    for call in watched:
        module = model.get_submodule(call.module)
        own = {hook.key: hook for hook in hooks_of(module)}
        found.append(HookCall(module, call.module, own.get(call.key) or everywhere[call.key], call.opaque))
    return tuple(found)


@dataclass(frozen=True)
class BackwardHooks:
    """The backward hooks of one call of a module, and the taps (see ``GradientTaps``) whose gradients they receive."""

    module: nn.Module
    name: str
    hooks: tuple[Hook, ...]
    call: TappedCall

    def events(self) -> list[tuple[int, Hook]]:
        """(time, hook): pre-hooks run when the backward reaches the end of the call, the others when it leaves through its beginning."""
        end = self.call.begins if any(i is not None for i in self.call.given) else self.call.ends
        return [(self.call.ends, h) for h in self.hooks if h.kind == BACKWARD_PRE] + [(end, h) for h in self.hooks if h.kind == BACKWARD]

    def __call__(self, hook: Hook, grads: Sequence[torch.Tensor | None]) -> None:
        """Calls the hook; raises RunError if it returns other gradients, because the backward has ended."""
        out, given = (tuple(None if i is None else grads[i] for i in side) for side in (self.call.out, self.call.given))
        if all(grad is None for grad in out):
            return
        result = hook.call(self.module, out) if hook.kind == BACKWARD_PRE else hook.call(self.module, given, out)
        if result is not None:
            what = f"{described(hook, self.name)} returns gradients, but the whole backward is one program, which has already run"
            remedy = "return nothing from it, or register it on the parallelized module itself; hooks of parameters may change gradients"
            raise RunError(what, where=self.name, remedy=remedy)


@dataclass(frozen=True)
class GradientTaps:
    """The taps of a program: inputs of zeros, each added to a value of the model, so that the gradient of the tap is that of the value.

    Backward hooks receive these gradients. ``kinds``: (shape, dtype) of each tap.
    """

    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    calls: tuple[BackwardHooks, ...]
    device: torch.device

    def zeros(self, program: ShardedProgram | None = None, sizes: Mapping[str, int] | None = None) -> list[torch.Tensor]:
        """The taps of a call; ``sizes``: its dynamic sizes, by default those of the example."""
        shapes = [shape for shape, _ in self.kinds]
        if program is not None and program.sizes:
            values = program.values(sizes or {})
            known = {end.name: shape for end, shape in zip(program.inputs, program.input_shapes, strict=True)}
            shapes = [evaluate_all(known[tap_name(i)], values) for i in range(len(self.kinds))]
        kinds = [dtype for _, dtype in self.kinds]
        return [torch.zeros(s, dtype=d, device=self.device, requires_grad=True) for s, d in zip(shapes, kinds, strict=True)]

    def call_after_backward(self, taps: Sequence[torch.Tensor]) -> None:
        """Schedules the hooks for when the backward has computed all gradients, in the order in which autograd would call them."""
        events = [(event, call, hook) for call in self.calls for event, hook in call.events()]

        def call_hooks(grads: Sequence[torch.Tensor | None]) -> None:
            for _, call, hook in sorted(events, key=lambda e: -e[0]):
                call(hook, grads)

        if taps:
            torch.autograd.graph.register_multi_grad_hook(taps, call_hooks)


def _gradient_taps(model: nn.Module, graph: PlanningGraph, device: torch.device) -> GradientTaps | None:
    """The taps of ``graph`` and the hooks of ``model`` for them; None for a program without taps."""
    if not graph.tapped:
        return None
    everywhere, nodes = global_hooks(), {i.name: i.node for i in graph.inputs}
    count = sum(i is not None for call in graph.tapped for i in (*call.given, *call.out))
    values = [graph.by_name[nodes[tap_name(i)]].meta["val"] for i in range(count)]
    calls = []
    for call in graph.tapped:
        module = model.get_submodule(call.module)
        hooks = tuple(h for h in (*everywhere, *hooks_of(module)) if h.kind in (BACKWARD, BACKWARD_PRE))
        calls.append(BackwardHooks(module, call.module, hooks, call))
    return GradientTaps(tuple((tuple(v.shape), v.dtype) for v in values), tuple(calls), device)


@dataclass(frozen=True)
class AfterRun:
    """What to do after a run of a program. ``calls``: the hooks to call, None for a program without values for hooks among its outputs;
    ``side_effects``: what the forward sets in attributes of ``modules``."""

    calls: tuple[HookCall, ...] | None
    gradient_taps: GradientTaps | None
    side_effects: SideEffects | None
    modules: tuple[nn.Module, ...]
    device: torch.device

    @property
    def still_valid(self) -> bool:
        """Whether the attributes that the forward increments or appends to still have types that allow it."""
        return self.side_effects is None or self.side_effects.serves([vars(module) for module in self.modules])

    def taps(self) -> dict[str, torch.Tensor]:
        """The taps at the example's sizes, further inputs of the program, by name."""
        return {} if self.gradient_taps is None else {tap_name(i): zero for i, zero in enumerate(self.gradient_taps.zeros())}

    def run(self, program: Runner, leaves: Sequence[Any]) -> Any:
        """What the model returns for the ``leaves`` of its arguments. Sets the attributes, calls the forward hooks and registers the
        backward hooks."""
        sizes = program.sizes_of(leaves)
        taps = [] if self.gradient_taps is None else self.gradient_taps.zeros(program.program, sizes)
        found = program(_with_taps(leaves, taps) if taps else leaves)
        if self.gradient_taps is not None:
            self.gradient_taps.call_after_backward(taps)
        if self.side_effects is not None:
            found, further = found if self.side_effects.reads else (found, ())
            self.side_effects.apply(self.modules, further, sizes, self.device)
        if self.calls is None:
            return found
        outputs, given = found
        for call, values in zip(self.calls, given, strict=True):
            call(values)
        return outputs


def _with_taps(leaves: Sequence[Any], taps: Sequence[torch.Tensor]) -> Leaves:
    found = Leaves([*leaves, *taps])
    found.objects = leaves.objects if isinstance(leaves, Leaves) else ()
    return found


def after_run_of(model: nn.Module, graph: PlanningGraph, device: torch.device) -> AfterRun:
    """What to do after a run of the program of ``graph``, which was traced with the hooks that ``model`` has now."""
    taps = _gradient_taps(model, graph, device)
    return AfterRun(_hook_calls(model, graph.watched), taps, graph.side_effects, tuple(model.modules()), device)
