"""Fast versions of the torch functions that every call of a compiled program uses, without their checks and Python frames.

What would replace it: the public functions named below, were they as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import methodcaller
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
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
    """Within it, operators dispatch directly to kernels, past autograd and autocast on every device.

    The autograd formulas of functional collectives are in Python and cost 10 to 25 us a call even if nothing is recorded.
    """
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)


plain_tensors_only = torch._C.DisableTorchFunctionSubclass
"""A context in which functions of torch return plain tensors for tensors of a Python subclass."""

DENSE = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of plain dense tensors; a lookup of the exact type takes a third of the time of ``isinstance``."""


def locals_of(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local tensor of each DTensor, plain tensors as they are, all contiguous; outside of autograd."""
    return [(x if type(x) in DENSE else _local(x)).contiguous() for x in values]


def _local(value: torch.Tensor) -> torch.Tensor:
    """The local tensor, after the collective that makes it: eager DTensor waits for its results only when they are used."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share elements: the address ranges of their local tensors overlap."""
    (a, b), (c, d) = (_range(x if type(x) in DENSE else _local(x)) for x in (one, other))
    return a < d and c < b


def _range(value: torch.Tensor) -> tuple[int, int]:
    start = value.data_ptr()
    if not value.numel():
        return start, start
    return start, start + value.element_size() * (1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)))


def versions_of(values: Sequence[torch.Tensor]) -> list[int]:
    """Each tensor's version: the number of in-place writes."""
    return [value._version for value in values]


def held(owner: torch.nn.Module, key: str) -> torch.Tensor:
    """``getattr(owner, key)`` for a parameter, without the module's lookup in Python unless it is no longer in ``_parameters``."""
    found = owner._parameters.get(key)
    return getattr(owner, key) if found is None else found


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) or forward-mode differentiation is active."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def jit_traced() -> bool:
    """Whether ``torch.jit.trace`` is active: ``torch.jit.is_tracing`` without its frame."""
    return torch._C._get_tracing_state() is not None


Tables = Sequence[tuple[dict[str, Any], str]]
"""(``vars`` of a module, name) for each parameter, or buffer."""


def held_parameters_of(tables: Tables) -> list[torch.nn.Parameter]:
    return [state["_parameters"][key] for state, key in tables]


def held_buffers_of(tables: Tables) -> list[torch.Tensor | None]:
    """The buffers; None for a name that is not (or no longer) a buffer."""
    return [state["_buffers"].get(key) for state, key in tables]


def parts_of(states: Sequence[dict[str, Any]]) -> tuple[list[Any], ...]:
    """The children and parameter names of modules, given by their ``vars``, as lists that compare fast."""
    modules, parameters = [state["_modules"] for state in states], [state["_parameters"] for state in states]
    children = [*chain.from_iterable(map(_VALUES, modules))]
    return children, [*map(len, modules)], [*chain.from_iterable(parameters)], [*map(len, parameters)]


_VALUES = methodcaller("values")


def own_tensors(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """Parameters and buffers of ``module`` itself, without submodules; tied ones are repeated."""
    return [*module._parameters.values(), *module._buffers.values()]
