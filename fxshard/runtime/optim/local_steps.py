"""Element-wise optimisers step on the local shards of a parallelized module's parameters.

On DTensors, ``optimizer.step()`` pays DTensor's dispatch for each tensor, which an element-wise update does not need. ``torch.optim`` runs
hooks before each step that may replace the step's arguments, including the optimiser itself. Our hook passes a stand-in of the same class
whose parameters, gradients and state are the local tensors. The stand-in lives for one step; new state is stored in the real optimiser as
DTensors. The optimiser itself is never modified, so a step that raises leaves nothing to restore. Anything that may not be element-wise
goes through DTensor.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxshard._torch_compat.dtensor.rules import wrap_like
from fxshard._torch_compat.dtensor.shards import local_like, spec_of
from fxshard.runtime.optim.host_state import NUMBERS, HostGroups, HostParameter, check_steps_on_shards, on_host

ELEMENTWISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.RMSprop,
        optim.Adadelta,
        optim.NAdam,
        optim.RAdam,
        optim.ASGD,
        optim.Rprop,
        optim.Adamax,
    }
)
"""Exact classes: a subclass may do anything."""

DTENSOR_ONLY = ("capturable", "differentiable")
"""Settings of a group that require DTensor's own path."""

STEPS_LOCALLY = "fxshard_steps_locally"


def step_locally(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Makes element-wise optimisers of ``torch.optim`` step on the shards of these parameters (DTensors) from now on."""
    for parameter in parameters:
        setattr(parameter, STEPS_LOCALLY, True)
    _install()


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The step's arguments with a stand-in for the optimiser; None, which keeps them, if the optimiser does not qualify.

    A closure computes gradients inside the step, when parameters must be DTensors.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    able = not torch.compiler.is_compiling() and type(optimizer) in ELEMENTWISE and closure is None
    if not able or not _is_ours(optimizer):
        check_steps_on_shards(optimizer, "its step goes through DTensor")
        return None
    return (_stand_in(optimizer), *args[1:]), kwargs


def _is_ours(optimizer: optim.Optimizer) -> bool:
    """Whether some parameters come from ``parallelize``, all other parameters are plain, and no group needs DTensor's own path."""
    some = False
    for group in optimizer.param_groups:
        if any(group.get(name) for name in DTENSOR_ONLY):
            return False
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                if not hasattr(parameter, STEPS_LOCALLY):
                    return False
                some = True
    return some


def _stand_in(optimizer: optim.Optimizer) -> optim.Optimizer:
    kind = _stand_in_class(type(optimizer))  # type: ignore[arg-type]  # classes are hashable; mypy asks the metaclass
    made: optim.Optimizer = object.__new__(kind)
    made.__dict__.update(optimizer.__dict__)
    del made.__dict__["param_groups"], made.__dict__["state"]
    made.__dict__["stands_for"] = optimizer
    return made


@functools.cache
def _stand_in_class(kind: Any) -> type[optim.Optimizer]:
    """A subclass of ``kind`` whose groups and state are made on first access: the user's hooks run after ours and may change gradients."""
    members = {
        "param_groups": functools.cached_property(lambda self: self.local_view[0]),
        "state": functools.cached_property(lambda self: self.local_view[1]),
        "local_view": functools.cached_property(lambda self: _local_view(self.stands_for)),
    }
    for name, member in members.items():
        member.__set_name__(kind, name)
    return type(kind.__name__, (kind,), members)


def _local_view(optimizer: optim.Optimizer) -> tuple[list[dict[str, Any]], Any]:
    """(groups, state) of the optimiser as local tensors; the optimiser's own if a gradient or state is laid out unlike its parameter."""
    groups, kept = [], _STATES.setdefault(optimizer, {})
    found: dict[torch.Tensor, Any] = {}
    host: list[list[HostParameter]] = []
    for group in optimizer.param_groups:
        parameters = []
        host.append([])
        for parameter in group["params"]:
            grad = parameter.grad
            shard = _local_parameter(parameter, grad)
            if shard is None:
                return _through_dtensor(optimizer)
            if on_host(parameter) is not None:
                host[-1] += [] if grad is None else [HostParameter(parameter, shard, optimizer.state[parameter], found)]
                continue
            if grad is not None:
                own = optimizer.state[parameter]
                state = own if shard is parameter else _local_state(parameter, own, kept)
                if state is None:
                    return _through_dtensor(optimizer)
                found[shard] = state
            parameters.append(shard)
        groups.append({**group, "params": parameters})
    return (HostGroups(groups, host), found) if any(host) else (groups, found)


def _through_dtensor(optimizer: optim.Optimizer) -> tuple[list[dict[str, Any]], Any]:
    check_steps_on_shards(optimizer, "a gradient or state has another layout than its parameter")
    return optimizer.param_groups, optimizer.state


def _local_parameter(parameter: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The shard of ``parameter`` with its gradient; a plain tensor itself; None if the gradient has another layout."""
    if not isinstance(parameter, DTensor):
        return None if isinstance(grad, DTensor) else parameter
    shard, local = local_like(parameter, parameter), local_like(grad, parameter)
    if shard is None or (local is None and grad is not None):
        return None
    alias = shard.detach()  # its gradient is freed with it
    alias.grad = local
    return alias


class LocalState(dict[str, Any]):
    """The state of one parameter on local tensors; new entries are also stored in the optimiser's own state, as DTensors.

    ``own``: the optimiser's own state; ``seen``: its entries, when these shards were taken from them.
    """

    def __init__(self, parameter: DTensor, own: dict[str, Any]) -> None:
        super().__init__()
        self.parameter, self.own, self.spec = parameter, own, spec_of(parameter)
        self.seen = dict(own)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self and self[name] is value:
            return
        super().__setitem__(name, value)
        whole = name not in NUMBERS and isinstance(value, torch.Tensor)
        self.own[name] = self.seen[name] = wrap_like(value, self.parameter) if whole else value

    def is_of(self, own: dict[str, Any]) -> bool:
        """Whether ``own`` and the parameter are unchanged since this was made."""
        if own is not self.own or spec_of(self.parameter) is not self.spec:
            return False
        return own.keys() == self.seen.keys() and all(map(operator.is_, own.values(), self.seen.values()))


_STATES: weakref.WeakKeyDictionary[optim.Optimizer, dict[torch.Tensor, LocalState]] = weakref.WeakKeyDictionary()
"""Local states of each optimiser by its parameters, reused between steps."""


def _local_state(parameter: DTensor, own: dict[str, Any], kept: dict[torch.Tensor, LocalState]) -> LocalState | None:
    """The state of one parameter as local tensors; None if an entry is neither a number nor laid out like the parameter."""
    found = kept.get(parameter)
    if found is not None and found.is_of(own):
        return found
    found = LocalState(parameter, own)
    for name, value in own.items():
        number = name in NUMBERS or not isinstance(value, torch.Tensor)
        local = value if number else local_like(value, parameter)
        if (local is None and value is not None) or isinstance(local, DTensor):
            return None
        dict.__setitem__(found, name, local)
    kept[parameter] = found
    return found
