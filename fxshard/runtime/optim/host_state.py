"""Optimisers step on parameters whose state is on the host: one parameter after another, its state copied to the device and back.

``torch.optim`` steps group by group. The groups of the stand-in (``local_steps``) are a list that gives the parameters on the host one by
one, each as a group of its own: it copies the state to the device before a group is stepped, that of the next beside it, and copies it back
when the step asks for the next group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.dtensor.rules import wrap_like
from fxshard._torch_compat.dtensor.shards import local_like
from fxshard.errors import RunError
from fxshard.plans.offload import OPTIMIZER, PARAMETERS
from fxshard.runtime.optim.host_copies import HostCopies

ON_HOST = "fxshard_on_host"
"""Attribute of a parameter that says what of it is on the host, one of ``offload.KINDS``."""

NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State that is one plain number per parameter; all other state has the parameter's shape."""

Group = dict[str, Any]


def on_host(parameter: torch.Tensor) -> str | None:
    """What of a parameter is on the host; None for nothing."""
    found: str | None = getattr(parameter, ON_HOST, None)
    return found


def place_on_host(parameter: torch.Tensor, kind: str) -> None:
    """Makes steps of element-wise optimisers hold on the host what ``kind`` says."""
    setattr(parameter, ON_HOST, kind)


class HostParameter:
    """One parameter in a step. ``shard``: its local tensor, with its gradient; ``own``: its state in the optimiser, DTensors on the host;
    ``states``: the state by shard, from which the step reads."""

    def __init__(self, parameter: DTensor, shard: torch.Tensor, own: dict[str, Any], states: dict[torch.Tensor, Any]) -> None:
        self.parameter, self.shard, self.own, self.states = parameter, shard, own, states
        self.stepped = shard
        """The tensor that is stepped: the shard, or a copy of it on the device."""

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return torch.device(self.parameter.device_mesh.device_type)

    def fetch(self, copies: HostCopies) -> torch.Tensor:
        """Copies the state, and the parameter with its gradient if that is on the host, to the device; returns the shard to step on."""
        state = {}
        for name, value in self.own.items():
            local = _whole(name, value) and local_like(value, self.parameter)
            if local is None:
                what = f"the state {name!r} of a parameter of shape {tuple(self.parameter.shape)} has another layout than the parameter"
                raise RunError(what, remedy="keep the state as the optimiser made it, or plan without offload")
            state[name] = value if local is False else copies.to_device(local)
        if on_host(self.parameter) == PARAMETERS and self.shard.grad is not None:
            self.stepped = copies.to_device(self.shard)
            self.stepped.grad = copies.to_device(self.shard.grad)
        self.states[self.stepped] = state
        return self.stepped

    def store(self, copies: HostCopies) -> None:
        """Copies them to the host."""
        stepped, self.stepped = self.stepped, self.shard
        if stepped is not self.shard:
            copies.to_host(stepped.detach(), self.shard)
        for name, value in self.states.pop(stepped).items():
            if not _whole(name, value):
                self.own[name] = value
                continue
            host = local_like(self.own.get(name), self.parameter)
            self.own[name] = wrap_like(copies.to_host(value, host), self.parameter)


def _whole(name: str, value: Any) -> bool:
    return name not in NUMBERS and isinstance(value, torch.Tensor)


class HostGroups(list[Group]):
    """The groups of a step; iterating gives first their parameters on the device, then each of those on the host."""

    def __init__(self, groups: Sequence[Group], host: Sequence[Sequence[HostParameter]]) -> None:
        super().__init__(groups)
        self.host = host

    def __iter__(self) -> Iterator[Group]:
        every = [(group, one) for group, host in zip(list(super().__iter__()), self.host, strict=True) for one in host]
        yield from (group for group in super().__iter__() if group["params"])
        if every:
            yield from _one_by_one(every, HostCopies(every[0][1].device))


def _one_by_one(every: Sequence[tuple[Group, HostParameter]], copies: HostCopies) -> Iterator[Group]:
    """A group for each parameter on the host. The next one's state is copied while one steps, two are on the device at once."""
    arriving: Callable[[int], torch.Tensor | None] = lambda k: every[k][1].fetch(copies) if k < len(every) else None  # noqa: E731
    shard = arriving(0)
    for k, (group, one) in enumerate(every):
        copies.finish()
        following = arriving(k + 1)
        copies.arrive()
        yield {**group, "params": [shard]}
        one.store(copies)
        shard = following
    copies.finish()


def check_steps_on_shards(optimizer: optim.Optimizer, why: str) -> None:
    """Raises RunError if the optimiser, whose step goes through DTensor (``why``), has parameters with state on the host."""
    away = [p for group in optimizer.param_groups for p in group["params"] if on_host(p) is not None]
    if away:
        what = f"{type(optimizer).__name__} cannot step on {len(away)} parameters whose state the plan holds on the host: {why}"
        remedy = "use an element-wise optimizer of torch.optim without a closure, capturable or differentiable, or plan without offload"
        raise RunError(what, where=f"offload={OPTIMIZER!r}", remedy=remedy)
