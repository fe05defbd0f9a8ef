"""What is done after a program: hooks of submodules that no graph can do are called, with the values that they would have seen, and
attributes are set."""

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


def _hook_calls(model: nn.Module, watched: Sequence[Watched] | None) -> tuple[HookCall, ...] | None:
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


@dataclass(frozen=True)
class BackwardHooks:
    """The hooks of the backward of one call of a module, and the taps whose gradients they get."""

    module: nn.Module
    name: str
    hooks: tuple[Hook, ...]
    call: TappedCall

    def events(self) -> list[tuple[int, Hook]]:
        """Each hook and when it is called: as the backward comes to the end of the call, and as it leaves by its beginning."""
        end = self.call.begins if any(i is not None for i in self.call.given) else self.call.ends
        return [(self.call.ends, h) for h in self.hooks if h.kind == BACKWARD_PRE] + [(end, h) for h in self.hooks if h.kind == BACKWARD]

    def __call__(self, hook: Hook, grads: Sequence[torch.Tensor | None]) -> None:
        """Raises RunError where a hook returns other gradients: the backward has ended."""
        out, given = (tuple(None if i is None else grads[i] for i in side) for side in (self.call.out, self.call.given))
        if all(grad is None for grad in out):
            return
        result = hook.call(self.module, out) if hook.kind == BACKWARD_PRE else hook.call(self.module, given, out)
        if result is not None:
            what = f"{described(hook, self.name)} returns gradients, but a backward is one program, which has ended"
            remedy = "return nothing from it, or register it on the parallelized module itself; hooks of parameters may change gradients"
            raise RunError(what, where=self.name, remedy=remedy)


@dataclass(frozen=True)
class Tapping:
    """The taps of a program: what they are, and whose hooks wait for their gradients."""

    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    calls: tuple[BackwardHooks, ...]
    device: torch.device

    def zeros(self, program: ShardedProgram | None = None, sizes: Mapping[str, int] | None = None) -> list[torch.Tensor]:
        """What the taps of a call are; ``sizes``: the dynamic ones of it, by default those of the example."""
        shapes = [shape for shape, _ in self.kinds]
        if program is not None and program.sizes:
            values = program.values(sizes or {})
            known = {end.name: shape for end, shape in zip(program.inputs, program.input_shapes, strict=True)}
            shapes = [evaluate_all(known[tap_name(i)], values) for i in range(len(self.kinds))]
        kinds = [dtype for _, dtype in self.kinds]
        return [torch.zeros(s, dtype=d, device=self.device, requires_grad=True) for s, d in zip(shapes, kinds, strict=True)]

    def wait(self, taps: Sequence[torch.Tensor]) -> None:
        """Calls the hooks once the backward has given all gradients, in the order in which it would have come by."""
        events = [(event, call, hook) for call in self.calls for event, hook in call.events()]

        def come(grads: Sequence[torch.Tensor | None]) -> None:
            for _, call, hook in sorted(events, key=lambda e: -e[0]):
                call(hook, grads)

        if taps:
            torch.autograd.graph.register_multi_grad_hook(taps, come)


def _tapping(model: nn.Module, graph: PlanningGraph, device: torch.device) -> Tapping | None:
    """None for a program without taps."""
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
    return Tapping(tuple((tuple(v.shape), v.dtype) for v in values), tuple(calls), device)


@dataclass(frozen=True)
class HooksAfter:
    """What is done after a run of a program. ``calls``: of hooks, None for a program that returns what the model returns and no more;
    ``side_effects``: what the forward sets in attributes of ``modules``."""

    calls: tuple[HookCall, ...] | None
    tapping: Tapping | None
    side_effects: SideEffects | None
    modules: tuple[nn.Module, ...]
    device: torch.device

    @property
    def fits(self) -> bool:
        """Whether the attributes that the forward counts or adds to are such still."""
        return self.side_effects is None or self.side_effects.serves([vars(module) for module in self.modules])

    def taps(self) -> dict[str, torch.Tensor]:
        """Further inputs of the program, by name."""
        return {} if self.tapping is None else {tap_name(i): zero for i, zero in enumerate(self.tapping.zeros())}

    def run(self, program: Runner, leaves: Sequence[Any]) -> Any:
        """What the model returns for the ``leaves`` of its arguments; then attributes are set, and hooks are called, or wait for the
        backward."""
        sizes = program.sizes_of(leaves)
        taps = [] if self.tapping is None else self.tapping.zeros(program.program, sizes)
        found = program(_and_taps(leaves, taps) if taps else leaves)
        if self.tapping is not None:
            self.tapping.wait(taps)
        if self.side_effects is not None:
            found, further = found if self.side_effects.reads else (found, ())
            self.side_effects.apply(self.modules, further, sizes, self.device)
        if self.calls is None:
            return found
        outputs, given = found
        for call, values in zip(self.calls, given, strict=True):
            call(values)
        return outputs


def _and_taps(leaves: Sequence[Any], taps: Sequence[torch.Tensor]) -> Leaves:
    found = Leaves([*leaves, *taps])
    found.objects = leaves.objects if isinstance(leaves, Leaves) else ()
    return found


def hooks_after(model: nn.Module, graph: PlanningGraph, device: torch.device) -> HooksAfter:
    """For the hooks that hang on ``model`` now, which ``graph`` was traced with."""
    return HooksAfter(_hook_calls(model, graph.watched), _tapping(model, graph, device), graph.side_effects, tuple(model.modules()), device)
