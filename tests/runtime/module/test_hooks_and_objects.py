"""Hooks of submodules in calls that change an object: hooks, results and the object have the values of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.errors import TraceError
from tests.slices import diagonal

Seen = list[Any]
Register = Callable[[nn.Module, Seen], Any]


@dataclass
class Cache:
    total: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))


class Adds(nn.Module):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.total = cache.total + x.detach().sum(0)
        return x * cache.total


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.adds, self.last = nn.Linear(4, 4), Adds(), nn.Linear(4, 2)

    def forward(self, x: Tensor, cache: Cache) -> dict[str, Tensor]:
        return {"y": self.last(self.adds(self.first(x), cache))}


def appends(net: nn.Module, seen: Seen) -> None:
    net.get_submodule("first").register_forward_hook(lambda m, args, out: seen.append(out))


def opaque(net: nn.Module, seen: Seen) -> None:
    """Stores a tensor made from a Python number, which no graph can compute."""
    net.get_submodule("first").register_forward_hook(lambda m, args, out: seen.append(torch.tensor(out.sum().item())))


def on_the_module_with_the_object(net: nn.Module, seen: Seen) -> None:
    net.get_submodule("adds").register_forward_hook(lambda m, args, out: seen.append(args[1].total))


def with_value(net: nn.Module, seen: Seen) -> None:
    net.get_submodule("first").register_forward_hook(lambda m, args, out: out * 2)


def of_the_backward(net: nn.Module, seen: Seen) -> None:
    net.get_submodule("last").register_full_backward_hook(lambda m, given, out: seen.append(given[0]))


def several(net: nn.Module, seen: Seen) -> None:
    net.get_submodule("last").register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for register in (opaque, with_value, appends, of_the_backward):
        register(net, seen)


def call(net: nn.Module, cache: Cache, rows: int, seen: Seen) -> list[Tensor]:
    """The result of a call, the state of the object, and what hooks saw."""
    seen.clear()
    y = net(torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).view(rows, 4).cos(), cache)["y"]
    y.square().sum().backward()
    return [y, cache.total, *seen]


@pytest.mark.parametrize(
    ("register", "late"), diagonal([appends, opaque, on_the_module_with_the_object, with_value, of_the_backward, several], [False, True])
)
def test_as_on_one_device(register: Register, late: bool, mesh: DeviceMesh) -> None:
    single = Net().double()
    net, mine, want = copy.deepcopy(single), Seen(), Seen()
    if not late:
        register(net, mine)
    sharded = fxshard.parallelize(net, (torch.zeros(3, 4, dtype=torch.float64), Cache()), mesh, compiler="eager", cache=False)
    if late:
        register(sharded, mine)
    register(single, want)
    ours, theirs = Cache(), Cache()
    for rows in (3, 3, 5):
        found, wanted = call(sharded, ours, rows, mine), call(single, theirs, rows, want)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_hook_that_returns_a_value_and_changes_an_object_is_refused(mesh: DeviceMesh) -> None:
    net, seen = Net().double(), Seen()
    net.first.register_forward_hook(lambda m, args, out: (seen.append(out), out)[1])
    with pytest.raises(TraceError, match="returns a value and changes Python objects, too"):
        fxshard.parallelize(net, (torch.zeros(3, 4, dtype=torch.float64), Cache()), mesh, compiler="eager", cache=False)
    assert not seen, "hooks never see fake tensors"
