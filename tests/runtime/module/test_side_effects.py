"""Attributes that a forward sets, in one process: lists shared by modules, copies of the module, numbers that it reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard


def parallelized(model: nn.Module, x: Tensor, mesh: DeviceMesh, **options: Any) -> Any:
    return fxshard.parallelize(copy.deepcopy(model), (x,), mesh, compiler="eager", cache=False, **options)


class Layer(nn.Module):
    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.up, self.losses = nn.Linear(4, 4), losses

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.losses.append((y**2).mean())
        return y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.layers = nn.Sequential(*(Layer(self.losses) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def test_one_list_of_losses_in_several_layers(mesh: DeviceMesh) -> None:
    model, x = Stack(), torch.randn(3, 4)
    sharded = parallelized(model, x, mesh)
    for _ in range(2):
        for one in (model, sharded):
            one.losses.clear()
            (one(x).sum() + torch.stack(one.losses).sum()).backward()
    assert len(sharded.losses) == 3 and all(layer.losses is sharded.losses for layer in sharded.layers)
    for (name, want), have in zip(model.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(have.grad.full_tensor(), want.grad, msg=name)


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.up, self.n, self.step = body, nn.Linear(4, 4), 0, 0
        self.items: list[Any] = [3]
        self.table: dict[str, int] = {"k": 1}

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.up(x))


def counts_in_training(self: Any, y: Tensor) -> Tensor:
    if self.training:
        self.n += 1
        return y
    return y * (2 if self.n >= 4 else 1)


def test_a_copy_keeps_track_of_attributes(mesh: DeviceMesh) -> None:
    model, x = Net(counts_in_training), torch.randn(3, 4)
    sharded = parallelized(model, x, mesh)
    twins = [model, sharded]
    for turn in "ttcetetete":
        if turn == "c":
            twins[1] = copy.deepcopy(sharded)
            continue
        for one in twins:
            one.train(turn == "t")
        torch.testing.assert_close(twins[1](x), model(x))
        assert twins[1].n == model.n


def test_a_number_that_the_user_changes_is_read_at_each_value(mesh: DeviceMesh) -> None:
    """Even if one program served two values, a third value may need another one."""
    model, x = Net(lambda self, y: y * (2 if self.step > 3 else 1)), torch.randn(3, 4)
    sharded = parallelized(model, x, mesh)
    for model.step in (0, 1, 2, 5, 1, 9):
        sharded.step = model.step
        torch.testing.assert_close(sharded(x), model(x))
    assert len(sharded.forward.programs) == 2


def counts_rows(self: Any, y: Tensor) -> Tensor:
    self.n += y.shape[0]
    return y


def test_counting_a_dynamic_number_of_rows_takes_one_program(mesh: DeviceMesh) -> None:
    model, x = Net(counts_rows), torch.randn(6, 4)
    sharded = parallelized(model, x[:3], mesh, dynamic=True)
    for rows in (3, 5, 3, 6, 1, 3, 3, 3, 3, 3, 3):
        torch.testing.assert_close(sharded(x[:rows]), model(x[:rows]))
        assert sharded.n == model.n
    assert len(sharded.forward.programs) == 1


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.k = nn.Linear(4, 4), 0
        self.seen: list[Tensor] = []
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        self.n += 1
        self.k += 1
        self.seen.append(y.detach())
        return y


def test_a_list_beside_a_buffer(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Remembers(), torch.randn(3, 4)
    with caplog.at_level("WARNING", "fxshard"):
        sharded = parallelized(model, x, mesh)
        for _ in range(3):
            torch.testing.assert_close(sharded(x), model(x))
    assert (float(sharded.n), sharded.k, len(sharded.seen)) == (3.0, 3, 3) and not caplog.messages
    torch.testing.assert_close(sharded.seen, model.seen)


def reads_a_list(self: Any, y: Tensor) -> Tensor:
    self.items.append(1)
    self.n = len(self.items)
    self.step = self.items[0]
    return y


def test_a_list_that_is_read_and_changed_gives_no_invented_values(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, 4)
    sharded = parallelized(Net(reads_a_list), x, mesh)
    with caplog.at_level("WARNING", "fxshard"):
        sharded(x)
    assert type(sharded.step) is int and sharded.items in ([3], [3, 1]) and sharded.n in (0, 2)


class Tempered(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.up, self.name = nn.Linear(4, 4), "soft"
        if buffer:
            self.register_buffer("temperature", torch.tensor(1.0))
        else:
            self.temperature: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(x) / self.temperature).softmax(-1)


@pytest.mark.parametrize("buffer", [False, True])
def test_a_scheduled_temperature(buffer: bool, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """As an attribute, each value makes a program, and the log says so and recommends a buffer. As a buffer, one program serves all."""
    model, x, values = Tempered(buffer), torch.randn(3, 4), [1.0 - k / 16 for k in range(10)]
    sharded = parallelized(model, x, mesh)
    with caplog.at_level("WARNING", "fxshard"):
        for value in values:
            for m in (sharded, model):
                if buffer:
                    m.temperature.fill_(value)
                else:
                    m.temperature = value
            torch.testing.assert_close(sharded(x), model(x))
    said = [record.getMessage() for record in caplog.records if record.name == "fxshard"]
    again = [line for line in said if "planning again" in line]
    if buffer:
        assert len(sharded.forward.programs) == 1 and not said
        return
    assert again == [f"planning again for training: args[0] (3, 4), self.temperature={value!r}" for value in values[1:]]
    (advice,) = [line for line in said if line not in again]
    assert "self.register_buffer('temperature', torch.tensor(...)), and change that with fill_()" in advice
