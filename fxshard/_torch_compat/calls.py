"""What a call of a compiled program asks of torch, without the checks and frames of torch's public ways to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

_KEYS = torch._C.DispatchKey
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
_AUTOCAST = tuple(name for name in dir(_KEYS) if name.startswith("Autocast"))


def _keys() -> torch._C.DispatchKeySet:
    found = torch._C.DispatchKeySet(getattr(_KEYS, _AUTOGRAD[0]))
    for name in (*_AUTOGRAD[1:], *_AUTOCAST):
        found = found | torch._C.DispatchKeySet(getattr(_KEYS, name))
    return found


_ABOVE_KERNELS = _keys()


def kernels_only() -> AbstractContextManager[None]:
    """Within it an operator is its kernel: neither autograd nor autocast, for any device, sees the call.

    Functional collectives have autograd formulas in Python, which cost 10 to 25 us a call though nothing is recorded.
    """
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)


DENSE = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that are what they hold, asked of a type and not by ``isinstance``, which takes three times as long."""


def locals_of(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each tensor the dense local one: that of a DTensor, or itself where it is local already; outside of autograd."""
    return [(x if type(x) in DENSE or not isinstance(x, DTensor) else x._local_tensor).contiguous() for x in values]


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share elements: their local memory, from the first to the last element, does."""
    (a, b), (c, d) = (_range(x._local_tensor if isinstance(x, DTensor) else x) for x in (one, other))
    return a < d and c < b


def _range(value: torch.Tensor) -> tuple[int, int]:
    start = value.data_ptr()
    if not value.numel():
        return start, start
    return start, start + value.element_size() * (1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)))


def versions_of(values: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written into."""
    return [value._version for value in values]


def held(owner: torch.nn.Module, key: str) -> torch.Tensor:
    """``getattr(owner, key)`` of a parameter, past the module's lookup in Python; by it where the parameter has moved."""
    found = owner._parameters.get(key)
    return getattr(owner, key) if found is None else found


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) or a level of forward-mode derivatives is around the call."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def jit_traced() -> bool:
    """Whether ``torch.jit.trace`` is around the call; ``torch.jit.is_tracing`` without its frame."""
    return torch._C._get_tracing_state() is not None


Tables = Sequence[tuple[dict[str, Any], str]]
"""(``vars`` of a module, name) for each parameter, or buffer."""


def held_parameters_of(tables: Tables) -> list[torch.nn.Parameter]:
    return [state["_parameters"][key] for state, key in tables]


def held_buffers_of(tables: Tables) -> list[torch.Tensor | None]:
    """None for what is no buffer (any more)."""
    return [state["_buffers"].get(key) for state, key in tables]


def parts_of(states: Sequence[dict[str, Any]]) -> tuple[list[Any], ...]:
    """The children and the names of parameters of modules whose ``vars`` are given, in lists that compare fast."""
    modules, parameters = [state["_modules"] for state in states], [state["_parameters"] for state in states]
    children = [*chain.from_iterable(map(_VALUES, modules))]
    return children, [*map(len, modules)], [*chain.from_iterable(parameters)], [*map(len, parameters)]


_VALUES = methodcaller("values")
