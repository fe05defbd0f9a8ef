"""Counters in objects, which each call changes, are dynamic sizes: one program serves every count."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard


@dataclass
class Clock:
    steps: int = 1
    name: str = "clock"
    marks: dict[str, int] = field(default_factory=lambda: {"late": 5})


class Counts(nn.Module):
    """Computes with a counter, increments it, and branches on it."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.layer, self.late = nn.Linear(4, 4), late

    def forward(self, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        y = self.layer(x) * clock.steps + torch.arange(clock.steps, 2 * clock.steps).sum()
        clock.steps += x.shape[0]
        return y if clock.steps < self.late else -y


class Marks(nn.Module):
    def forward(self, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        clock.marks["late"] += 1
        return x + clock.marks["late"]


def parallelized(model: nn.Module, args: Any, mesh: DeviceMesh, **options: Any) -> Any:
    return fxshard.parallelize(copy.deepcopy(model), args, mesh, train=False, compiler="eager", cache=False, **options)


@torch.no_grad()
def test_one_program_serves_every_count(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Counts(10_000).double(), torch.randn(3, 4, dtype=torch.float64)
    sharded = parallelized(model, (x, Clock()), mesh)
    mine, want = Clock(), Clock()
    for _ in range(6):
        torch.testing.assert_close(sharded(x, mine), model(x, want), rtol=1e-12, atol=1e-12)
        assert mine == want and type(mine.steps) is int
    assert len(sharded.forward.programs) == 1
    assert not [r.getMessage() for r in caplog.records if r.name == "fxshard" and r.levelno >= logging.WARNING]
    twin = copy.deepcopy(sharded)
    torch.testing.assert_close(twin(x, Clock(50)), model(x, Clock(50)), rtol=1e-12, atol=1e-12)
    assert len(twin.forward.programs) == 1


@torch.no_grad()
def test_a_branch_on_a_count_takes_one_more_program(mesh: DeviceMesh) -> None:
    model, x = Counts(20).double(), torch.randn(3, 4, dtype=torch.float64)
    sharded = parallelized(model, (x, Clock()), mesh)
    for steps, programs in ((4, 1), (16, 1), (17, 2), (40, 2), (1, 2), (19, 2), (0, 3)):  # 0 is not a size
        mine, want = Clock(steps), Clock(steps)
        torch.testing.assert_close(sharded(x, mine), model(x, want), rtol=1e-12, atol=1e-12)
        assert mine == want and len(sharded.forward.programs) == programs
    guard, *_ = sharded.forward.programs[0].guards
    assert "steps" in str(guard) and "test_counted.py" in str(guard)


@torch.no_grad()
@pytest.mark.parametrize("model", [Marks(), Counts(10_000)])
def test_a_number_that_is_not_dynamic_is_named_and_planned_for_each_value(
    model: nn.Module, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers in dicts are never dynamic, and with dynamic=False no number is."""
    x = torch.randn(3, 4)
    options = {"dynamic": False} if isinstance(model, Counts) else {}
    with caplog.at_level(logging.WARNING, "fxshard"):
        sharded = parallelized(model, (x, Clock()), mesh, **options)
        mine, want = Clock(), Clock()
        for _ in range(3):
            torch.testing.assert_close(sharded(x, mine), model(x, want))
    assert mine == want and len(sharded.forward.programs) == 3
    said = [line for line in caplog.messages if "a Python number" in line]
    assert len(said) == 1 and ("marks['late']" if isinstance(model, Marks) else "args[1].steps") in said[0]


class Follows(nn.Module):
    """Copies one counter to the other, then changes both."""

    def forward(self, x: torch.Tensor, one: Clock, other: Clock) -> torch.Tensor:
        other.steps, one.steps = one.steps, one.steps + 7
        other.steps += x.shape[0]
        return x * other.steps


@torch.no_grad()
def test_a_freed_number_is_not_confused_with_a_new_one(mesh: DeviceMesh) -> None:
    """If numbers were known by their id(), a new one might have the id of a freed one."""
    x = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(4):
        sharded = parallelized(Follows(), (x, Clock(2), Clock(5)), mesh)
        mine, want = (Clock(2), Clock(5)), (Clock(2), Clock(5))
        for _ in range(2):
            torch.testing.assert_close(sharded(x, *mine), Follows()(x, *want))
            assert mine == want


@torch.no_grad()
@pytest.mark.parametrize("first", [None, -9, True, 2**70, 1.5])
def test_values_that_are_not_sizes_stay_values_beside_counts(first: Any, mesh: DeviceMesh) -> None:
    class Beside(nn.Module):
        def forward(self, x: torch.Tensor, one: Clock, other: Clock) -> torch.Tensor:
            other.steps += 1
            return x * other.steps

    x, sharded = torch.randn(3, 4), parallelized(Beside(), (torch.randn(3, 4), Clock(first), Clock(5)), mesh)
    mine, want = (Clock(first), Clock(5)), (Clock(first), Clock(5))
    for _ in range(3):
        torch.testing.assert_close(sharded(x, *mine), Beside()(x, *want))
    assert mine == want and len(sharded.forward.programs) == 1


@torch.no_grad()
def test_counts_with_a_dynamic_number_of_rows(mesh: DeviceMesh) -> None:
    model, x = Counts(10_000).double(), torch.randn(6, 4, dtype=torch.float64)
    sharded = parallelized(model, (x[:3], Clock()), mesh, dynamic=True)
    mine, want = Clock(), Clock()
    for rows in (3, 5, 3, 6, 1):
        torch.testing.assert_close(sharded(x[:rows], mine), model(x[:rows], want))
    assert mine == want and len(sharded.forward.programs) == 1


class Squares(nn.Module):
    def forward(self, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        clock.steps = clock.steps**2
        return x * 2


@torch.no_grad()
@pytest.mark.parametrize("first", [5, 2**31 - 1, 2**62])
def test_numbers_too_large_for_sizes_stay_values(first: int, mesh: DeviceMesh) -> None:
    """No tensor has such a size, so each such number has a program of its own."""
    model, x = Squares(), torch.randn(3, 4)
    sharded = parallelized(model, (x, Clock(first)), mesh)
    made = []
    for steps in (first, 6, 7, 2**31 - 1, 2**31, 2**62, 2**70, 9, 12):
        mine, want = Clock(steps), Clock(steps)
        torch.testing.assert_close(sharded(x, mine), model(x, want))
        assert mine == want
        made.append(len(sharded.forward.programs))
    assert made[3] < made[4] < made[6] == made[-1], "one program for all sizes, and one for each other number"


@torch.no_grad()
def test_the_log_shows_a_count_as_a_number(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Counts(20), torch.randn(3, 4)
    sharded = parallelized(model, (x, Clock(4)), mesh)
    with caplog.at_level(logging.WARNING, "fxshard"):
        sharded(x, Clock(40))
    (said,) = [line for line in caplog.messages if "planning again" in line]
    assert said == "planning again for inference: args[0] (3, 4), args[1].steps=40, and any other args[1].steps"
