"""Private names of torch (2.13): read, set and remove the hooks of modules and tensors.

What would replace it: accessors of hooks on modules and tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as globals_of_modules

FORWARD, FORWARD_PRE, BACKWARD, BACKWARD_PRE = "forward hook", "forward pre-hook", "backward hook", "backward pre-hook"
_TABLES = {
    FORWARD_PRE: ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", ""),
    FORWARD: ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    BACKWARD_PRE: ("_backward_pre_hooks", "", ""),
    BACKWARD: ("_backward_hooks", "", ""),
}
TABLES = tuple(names[0] for names in _TABLES.values())
"""The attributes of a module that hold its hooks."""
_GLOBAL = {kind: getattr(globals_of_modules, f"_global{names[0]}") for kind, names in _TABLES.items()}
_GLOBAL_WITH_KWARGS = globals_of_modules._global_forward_hooks_with_kwargs


@dataclass(frozen=True)
class Hook:
    """A hook of a module, or of all modules (``everywhere``), as registered by ``register_forward_hook`` and the like."""

    kind: str
    key: int
    call: Callable[..., Any]
    with_kwargs: bool = False
    everywhere: bool = False


def hooks_of(module: nn.Module) -> tuple[Hook, ...]:
    """The module's own hooks; those of one kind are in call order."""
    state, found = vars(module), []
    for kind, (table, with_kwargs, _) in _TABLES.items():
        for key, call in state[table].items():
            found.append(Hook(kind, key, call, bool(with_kwargs) and key in state[with_kwargs]))
    return tuple(found)


def global_hooks() -> tuple[Hook, ...]:
    """The hooks of all modules: ``torch.nn.modules.module.register_module_forward_hook`` and the like."""
    if not any(_GLOBAL.values()):
        return ()
    return tuple(Hook(k, key, call, key in _GLOBAL_WITH_KWARGS, True) for k, table in _GLOBAL.items() for key, call in table.items())


def set_hooks(module: nn.Module, hooks: tuple[Hook, ...]) -> None:
    """Replace the module's hooks by these."""
    state = vars(module)
    for kind, (table, with_kwargs, always) in _TABLES.items():
        mine = [h for h in hooks if h.kind == kind]
        state[table] = type(state[table])((h.key, h.call) for h in mine)
        if with_kwargs:
            state[with_kwargs] = type(state[with_kwargs])((h.key, True) for h in mine if h.with_kwargs)
        if always:
            state[always] = type(state[always])()


def without_hooks(module: nn.Module) -> nn.Module:
    """Remove the hooks of ``module`` and its submodules, in place; the caller passes a copy."""
    for part in module.modules():
        set_hooks(part, ())
    return module


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    kept = [(table, dict(table)) for table in _GLOBAL.values()]
    for table, _ in kept:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in kept:
            table.update(hooks)


def while_capturing(function: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``function`` when Dynamo captures a call of it, and does nothing when it runs eagerly."""
    from torch._dynamo.comptime import comptime

    def noted(_: Any) -> None:
        function()

    def call() -> None:
        comptime(noted)

    return call


def while_capturing_tensor(function: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """As ``while_capturing``, for a function of a tensor, which receives the fake tensor."""
    from torch._dynamo.comptime import comptime

    def noted(context: Any) -> None:
        function(context.get_local("value").as_fake())

    def call(value: torch.Tensor) -> None:
        comptime(noted)

    return call


def is_full(module: nn.Module, hook: Hook) -> bool:
    """Whether a backward hook was registered by ``register_full_backward_hook``, not by its predecessor."""
    if hook.kind != BACKWARD:
        return True
    return bool(globals_of_modules._global_is_full_backward_hook if hook.everywhere else module._is_full_backward_hook)


def is_capturing() -> bool:
    """Whether Dynamo is capturing the calling code."""
    return torch.compiler.is_compiling()


def any_hooks(states: Sequence[dict[str, Any]]) -> bool:
    """Whether one of the modules, given by their ``vars``, has a hook."""
    return any(chain.from_iterable(map(_HOOKS, states)))


_HOOKS = itemgetter(*TABLES)


def any_global_hooks() -> bool:
    return any(_GLOBAL.values())


def has_leaf_hooks(parameter: torch.Tensor) -> bool:
    """Whether a leaf has tensor hooks: ``register_hook``, ``register_post_accumulate_grad_hook``."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def has_gradient_hooks(value: torch.Tensor) -> bool:
    """Whether a tensor that is not a leaf has gradient hooks or retains its gradient."""
    return not value.is_leaf and (bool(value._backward_hooks) or value.retains_grad)
