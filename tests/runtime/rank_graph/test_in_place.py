"""Inputs that compiled code writes in place: which ones, and that their old values are read before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard


class Changes(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.inside = forward
        self.register_buffer("seen", torch.zeros(4, 4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.inside(self, a, b)


def cache(self: Any, a: Tensor, b: Tensor) -> Tensor:
    a.index_copy_(0, torch.arange(2), b[:2])
    self.seen.add_(a)
    return a @ b


def swap(self: Any, a: Tensor, b: Tensor) -> Tensor:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)
    return a + b


def reads_before(self: Any, a: Tensor, b: Tensor) -> Tensor:
    before = a.t() * 2
    a.mul_(b)
    return before + b


def crossed(self: Any, a: Tensor, b: Tensor) -> Tensor:
    old = a.clone()
    a[:] = b
    b[:] = old + b
    return a - b


def given_back(self: Any, a: Tensor, b: Tensor) -> Tensor:
    a.add_(b)
    return a


WAYS: dict[str, tuple[Any, set[str]]] = {
    "a cache": (cache, {"args[0]", "seen"}),
    "two inputs are swapped": (swap, set()),
    "each of two is computed from the other": (crossed, set()),
    "its old value is read": (reads_before, {"args[0]"}),
    "it is returned": (given_back, {"args[0]"}),
}


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Pairs of separate tensors, with a transposed one, of one memory, and interleaved in one memory."""
    torch.manual_seed(0)
    rows, wide = torch.randn(8, 4), torch.randn(4, 8)
    return [
        (torch.randn(4, 4), torch.randn(4, 4)),
        (torch.randn(4, 4).t(), torch.randn(4, 4)),
        (rows[:4], rows[4:]),
        (wide[:, :4], wide[:, 4:]),
    ]


@pytest.mark.parametrize("name", WAYS)
@torch.no_grad()
def test_writes_in_place_equal_one_device(name: str, mesh: DeviceMesh) -> None:
    forward, want = WAYS[name]
    model = Changes(forward)
    sharded: Any = fxshard.parallelize(copy.deepcopy(model), pairs()[0], mesh, train=False, cache=False)
    (made,) = next(iter(sharded.forward.by_key.values()))
    compiled = made.runner.compiled
    assert {compiled.program.inputs[i].name for i in compiled.artefact.written} == want
    for mine, others in zip(pairs(), pairs(), strict=True):
        got, expected = sharded(*mine), model(*others)
        for have, wanted in zip((got, *mine, sharded.seen), (expected, *others, model.seen), strict=True):
            torch.testing.assert_close(have, wanted)


@torch.no_grad()
def test_another_input_in_the_same_memory_is_read_before_the_write(mesh: DeviceMesh) -> None:
    def both(self: Any, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b.cumsum(0)

    x = torch.randn(4, 4)
    sharded: Any = fxshard.parallelize(Changes(both), (x, x.clone()), mesh, train=False, cache=False)
    want = x.cumsum(0), x * 2
    torch.testing.assert_close((sharded(x, x), x), want)  # each argument is a global value of its own, even if two are one tensor
