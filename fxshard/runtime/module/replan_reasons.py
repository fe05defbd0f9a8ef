"""Says for the log what changed in a module's state since the last program for such a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxshard.runtime.calls.dynamic_sizes import size_free_key
from fxshard.runtime.module.module_program import ModuleProgram
from fxshard.runtime.module.module_state import Hooks, ModuleSnapshot, ModuleState, same_hooks
from fxshard.text_table import listed


def trainable_text(state: ModuleState, now: ModuleSnapshot, key: Any, keys: Iterable[Any]) -> str:
    """``, requires_grad=False of layers.0.weight``, if the call with this ``key`` differs from the last of ``keys``, those of earlier
    programs, in the parameters that require gradients; ``""`` if not. Keys are those of calls (see ``ShardedForward``)."""
    same_call = size_free_key(key)[-1]
    before = [one for one in keys if one[0] is not None and size_free_key(one)[-1] == same_call]
    if key[0] is None or not before or before[-1][0] == now.trainable:
        return ""
    changed = [i for i, (one, other) in enumerate(zip(before[-1][0], now.trainable, strict=True)) if one != other]
    groups = {value: [state.parameter_name(i) for i in changed if now.trainable[i] == value] for value in (False, True)}
    return "".join(f", requires_grad={value} of {listed(names)}" for value, names in groups.items() if names)


def hooks_text(state: ModuleState, last: ModuleProgram, now: Hooks) -> str:
    """``, with the forward hook of layers.0``, ``, without ...``: the hooks by which ``now`` differs from those of the program ``last``."""
    if same_hooks(last.hooks, now):
        return ""
    before, after = ({(i, hook.kind, hook.call): hook for i, hook in hooks} for hooks in (last.hooks, now))
    found = [f", with the {_hook(state, *one)}" for one in after if one not in before]
    found += [f", without the {_hook(state, *one)}" for one in before if one not in after]
    return "".join(found) or ", with hooks in another order"


def _hook(state: ModuleState, index: int, kind: str, _: Any) -> str:
    return f"{kind} of {'all modules' if index < 0 else state.module_name(index)}"
