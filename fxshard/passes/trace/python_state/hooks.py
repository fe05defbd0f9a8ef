"""Hooks of submodules while a model is traced: their computations become part of the graph.

A hook may also change Python objects (append an activation to a list), which a graph cannot do, or call what Dynamo cannot trace (print).
With ``observe``, the graph returns the arguments of such hooks after the model's own outputs, and the caller runs the hooks with the real
values after the program. Tracing finds these hooks: an attempt in which a new one appears is repeated. Hooks of the model itself run
around a parallelized forward and are not traced then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dynamo.hooks import (
    BACKWARD,
    BACKWARD_PRE,
    FORWARD,
    FORWARD_PRE,
    Hook,
    global_hooks,
    hooks_of,
    is_capturing,
    is_full,
    set_hooks,
    while_capturing,
)
from fxshard._torch_compat.dynamo.side_effects import noted_changes
from fxshard.errors import FxshardError, TraceError
from fxshard.graph.planning_graph import Watched
from fxshard.passes.trace.python_state.assigned import ASSIGNED, names_of_modules
from fxshard.passes.trace.python_state.dynamo_changes import OF_TORCH
from fxshard.passes.trace.python_state.gradient_taps import TAPS, Taps

log = logging.getLogger("fxshard")
T = TypeVar("T")
REMEDY_BACKWARD = (
    "use register_full_backward_hook on a submodule, or on the model itself after parallelize: its own hooks run around the program"
)
REMEDY_BOTH = (
    "make two hooks of it: one that returns the value; one that changes objects and returns None, which is called after the program"
)


def described(hook: Hook, module: str) -> str:
    """A description for messages, such as ``the forward hook keep (model.py:12) of layers.0``."""
    function = getattr(hook.call, "func", hook.call)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    whose = "all modules" if hook.everywhere else module or "the model"
    return f"the {hook.kind} {name}{place} of {whose}"


class TracedHooks:
    """The hooks of one model during its trace, over all attempts.

    By key of the hook: ``changing``, those that change Python objects; ``opaque``, those that cannot be traced, with the reason;
    ``of_torch``, torch's own; ``found``, those that changed objects in this attempt; ``valued``, those that returned a value; ``left_out``,
    backward hooks that are not called.
    """

    def __init__(self, observe: bool, train: bool) -> None:
        self.observe, self.train, self.everywhere = observe, train, global_hooks()
        self.changing: set[int] = set()
        self.opaque: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.observed: list[tuple[str, int]] = []
        self.inside: list[int] = []
        self.of_torch: set[int] = set()
        self.found: set[int] = set()
        self.valued: set[int] = set()
        self.seen: list[Any] = []
        self.left_out: set[int] = set()
        self.taps = Taps()

    def settle(self, capture: Callable[[], T]) -> T:
        """Repeats ``capture`` until it is known which hooks must be called after the program, and returns its last result."""
        while True:
            self.restart()
            try:
                result = capture()
            except FxshardError:
                raise
            except Exception as error:
                blamed = {self.inside[-1]} if self.inside else self.found - self.opaque.keys()
                if not blamed:
                    self._refuse_regions(error)
                    raise
                said = next(iter(str(error).splitlines()), type(error).__name__)
                self.opaque |= dict.fromkeys(sorted(blamed), said)
                continue
            for key in sorted(self.found & self.valued):
                raise TraceError(f"{self.names[key]} returns a value and changes Python objects, too", remedy=REMEDY_BOTH)
            settled = self.found <= self.changing
            self.changing |= self.found
            if self.taps.settled() and settled:
                self._warn()
                return result

    def _refuse_regions(self, error: Exception) -> None:
        """Raises TraceError for a hook inside a subgraph (checkpoint, loop): its arguments cannot leave it."""
        called = [key for key in self.names if key in self.changing or key in self.opaque]
        if self.observe and called and "Unsafe side effect" in str(error):
            what = (
                f"{self.names[called[0]]} would be called after the program, but its module may run within torch.utils.checkpoint or a loop"
            )
            raise TraceError(
                what, remedy="remove it there, and let the model return the values that it needs, or plan with a memory_limit instead"
            ) from error

    def _warn(self) -> None:
        if not self.observe:
            for key in sorted({*self.changing, *self.opaque, *self.left_out}):
                log.warning("%s does what a plan cannot include: only a parallelized module calls it, after its program", self.names[key])

    def install(self, model: nn.Module, copied: nn.Module) -> nn.Module:
        """Wraps the hooks of ``copied``, a copy of ``model`` for tracing; returns the module to capture."""
        for (name, module), own in zip(copied.named_modules(), model.modules(), strict=True):
            hooks = (*(self.everywhere if name else ()), *hooks_of(module))
            originals = {h.key: h for h in hooks_of(own)}
            if hooks:
                wrapped = [self._wrapped(name, h, originals.get(h.key, h)) for h in hooks if h.kind in (FORWARD, FORWARD_PRE)]
                set_hooks(module, (*wrapped, *self._backward(name, own, [h for h in hooks if h.kind in (BACKWARD, BACKWARD_PRE)])))
        return Captured(copied, self) if self.names else copied

    def recorded(self, model: nn.Module, twin: nn.Module) -> nn.Module:
        """Makes ``twin``, a copy of ``model`` without hooks to run as Python, return the same as ``Captured``, without calling hooks."""
        if not self.names or not self.observe:
            return twin
        seen: list[Any] = []
        for (name, module), own in zip(twin.named_modules(), model.modules(), strict=True):
            hooks = (*(self.everywhere if name else ()), *hooks_of(own))
            called = [h for h in hooks if h.kind in (FORWARD, FORWARD_PRE) and (h.key in self.opaque or h.key in self.changing)]
            set_hooks(module, tuple(Hook(h.kind, h.key, _recording(seen), h.with_kwargs) for h in called))
        return Recorded(twin, seen)

    def _backward(self, name: str, module: nn.Module, hooks: Sequence[Hook]) -> tuple[Hook, ...]:
        """Replacements for the module's backward hooks; raises TraceError for those of the model itself and ``register_backward_hook``."""
        if not hooks or not self.train:
            return ()
        for hook in hooks:
            if not name or not is_full(module, hook):
                what = f"{described(hook, name)} would not be called: a backward is one program"
                raise TraceError(what, where=name or type(module).__name__, remedy=REMEDY_BACKWARD)
            self.names[hook.key] = described(hook, name)
        if self.observe:
            return self.taps.hooks(name)
        self.left_out.update(hook.key for hook in hooks)
        return ()

    def _wrapped(self, name: str, hook: Hook, original: Hook) -> Hook:
        self.names[hook.key] = described(original, name)
        function, seen = hook.call, self.seen
        if getattr(type(function), "__module__", "").startswith(OF_TORCH):
            self.of_torch.add(hook.key)
        begins, ends, notes, returns = (while_capturing(f) for f in self._notes(name, hook.key))
        opaque = hook.key in self.opaque
        observed = self.observe and (opaque or hook.key in self.changing)

        def call(module: nn.Module, *given: Any) -> Any:
            if not is_capturing():
                return None
            if observed:
                seen.append(pytree.tree_map(_as_it_is, given))
                notes()
            if opaque:
                return None
            begins()
            result = function(module, *given)
            ends()
            if result is not None:
                returns()
            return result

        return Hook(hook.kind, hook.key, call, hook.with_kwargs)

    def _notes(self, name: str, key: int) -> tuple[Callable[[], None], ...]:
        return (
            lambda: self.inside.append(key),
            lambda: self.inside.remove(key),
            lambda: self.observed.append((name, key)),
            lambda: self.valued.add(key),
        )

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """While Dynamo captures ``model``: records which hook was running when a Python object changed."""
        return noted_changes(self._changed, ASSIGNED, names_of_modules(model))

    def _changed(self) -> None:
        if self.inside and self.inside[-1] not in self.of_torch:
            self.found.add(self.inside[-1])

    def restart(self) -> None:
        """Resets the record of an attempt; Dynamo may start a capture more than once."""
        self.observed, self.inside, self.found, self.valued = [], [], set(), set()
        self.taps.restart()

    @property
    def watched(self) -> tuple[Watched, ...] | None:
        """The calls whose arguments the graph returns, in order; None if it returns only the model's outputs."""
        calls = tuple(Watched(module, key, self.opaque.get(key, "")) for module, key in self.observed)
        return calls if self.names and self.observe else None

    def errors(self, of_the_model: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """``of_the_model``, which calls the model on fakes if a capture fails; disabled if there are hooks, which must not see fakes."""
        return contextlib.nullcontext() if self.names else of_the_model


class Captured(nn.Module):
    """A model with hooks; with ``observe`` it also returns the arguments of the observed hooks."""

    def __init__(self, model: nn.Module, hooks: TracedHooks) -> None:
        super().__init__()
        self.model, self.observe, self.seen, self.begins = model, hooks.observe, hooks.seen, while_capturing(hooks.restart)
        self.queue = hooks.taps.queue

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.begins()
        self.queue.extend(kwargs.pop(TAPS, ()))
        result = self.model(*args, **kwargs)
        return (result, list(self.seen)) if self.observe else result


class Recorded(nn.Module):
    """A model that also returns what its hooks recorded in ``seen``."""

    def __init__(self, model: nn.Module, seen: list[Any]) -> None:
        super().__init__()
        self.model, self.seen = model, seen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs), list(self.seen)


def _recording(seen: list[Any]) -> Callable[..., None]:
    return lambda module, *given: seen.append(pytree.tree_map(_as_it_is, given))


def _as_it_is(value: Any) -> Any:
    """A copy of a tensor that later in-place changes do not reach; other values unchanged."""
    return value.clone() if isinstance(value, torch.Tensor) else value
