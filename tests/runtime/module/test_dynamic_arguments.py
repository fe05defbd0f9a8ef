"""Dynamic sizes in calls that pass other arguments than the example call did, and log lines about sizes that stay static."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import Dim

import fxshard
from fxshard.errors import OptionError


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4).double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.inner(x)
        return out if y is None else (out - y).square().mean()


def data(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64)


def parallelized(model: nn.Module, args: Any, mesh: DeviceMesh, **options: Any) -> Any:
    return fxshard.parallelize(copy.deepcopy(model), args, mesh, **{"compiler": "eager", "cache": False, "train": False, **options})


def programs(model: Any) -> int:
    return len(model.forward.programs)


B = {0: "b"}
CALLS = {
    "both": lambda x, y: ((x, y), {}),
    "by keyword": lambda x, y: ((x,), {"y": y}),
    "without": lambda x, y: ((x,), {}),
    "None": lambda x, y: ((x, None), {}),
}


@torch.no_grad()
@pytest.mark.parametrize("given", [{"x": B, "y": B}, (B, B), {"args[0]": B, "kwargs['y']": B}], ids=["names", "tuple", "paths"])
@pytest.mark.parametrize("example", ["both", "without"])
def test_each_kind_of_call_has_one_program_for_all_sizes(given: Any, example: str, mesh: DeviceMesh) -> None:
    model = Scored()
    args, kwargs = CALLS[example](*data(4))
    sharded = parallelized(model, args, mesh, example_kwargs=kwargs, dynamic_shapes=given)
    for call in CALLS.values():
        for rows in (4, 6, 9):
            args, kwargs = call(*data(rows))
            torch.testing.assert_close(sharded(*args, **kwargs), model(*args, **kwargs))
    assert programs(sharded) == len(CALLS)
    assert {one.name for program in sharded.forward.programs for one in program.sizes} == {"b"}


@torch.no_grad()
def test_example_sizes_and_ranges_of_calls_without_an_argument(mesh: DeviceMesh) -> None:
    shapes = {"x": {0: "b"}, "y": {0: Dim("b", max=16)}}
    sharded = parallelized(Scored(), data(4), mesh, dynamic_shapes=shapes, example_sizes=[((4,), 1), ((8,), 3)])
    sharded(data(6)[0])
    assert [[one.weight for one in program.plan.example_sizes] for program in sharded.forward.programs] == [[0.25, 0.75]] * 2
    with pytest.raises(OptionError, match="is 20, it must be from 1 to 16"):
        sharded(data(20)[0])


def test_a_name_of_no_argument_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(OptionError, match="there is no argument 'targets'"):
        parallelized(Scored(), (data(4)[0],), mesh, dynamic_shapes={"x": B, "targets": B})


@torch.no_grad()
def test_an_argument_without_dynamic_shapes_joins_the_dim_it_changes_with(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = Scored(), data(4)
    sharded = parallelized(model, (x,), mesh, dynamic_shapes={"x": B})
    for rows in (4, 6, 9, 12):
        x, y = data(rows)
        torch.testing.assert_close(sharded(x, y), model(x, y))
    assert programs(sharded) == 3  # for the example, for the first size with y, for every other size
    assert "sizes stay static: b (dim 0 of args[0]) cannot change" in caplog.text


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.inner(row) for row in x), start=torch.zeros(()))


def levels(records: list[logging.LogRecord], text: str) -> list[int]:
    return [record.levelno for record in records if text in record.getMessage()]


@torch.no_grad()
def test_with_dynamic_true_the_log_names_static_dims(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """A dim that the model fixes is logged as info, and as a warning once it changes."""
    caplog.set_level(logging.INFO, "fxshard")
    sharded = parallelized(Rows(), (torch.randn(3, 4),), mesh, dynamic=True)
    assert set(levels(caplog.records, "sizes stay static: args_0_0 (dim 0 of args[0]) cannot change")) == {logging.INFO}
    caplog.clear()
    sharded(torch.randn(5, 4))
    assert levels(caplog.records, "sizes stay static: args_0_0 (dim 0 of args[0]) cannot change") == [logging.WARNING]
    assert logging.WARNING not in levels(caplog.records, "args_0_1")


@torch.no_grad()
def test_example_sizes_of_a_dim_that_stays_static(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """Only the example sizes with the dim's static size count."""
    shapes = ({0: Dim.AUTO, 1: "seq"},)
    sizes = [{"args_0_0": 3, "seq": 8}, {"args_0_0": 3, "seq": 16}, {"args_0_0": 6, "seq": 8}]
    sharded = parallelized(Loops(), (torch.randn(3, 4),), mesh, dynamic_shapes=shapes, example_sizes=sizes)
    (program,) = sharded.forward.programs
    assert [(dict(one.sizes), one.weight) for one in program.plan.example_sizes] == [({"seq": 8}, 0.5), ({"seq": 16}, 0.5)]
    text = "the plan is not optimised for example_sizes at args_0_0=6, seq=8: this program is for args_0_0=3 (dim 0 of args[0]) alone"
    assert text in caplog.text


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum((row.cos() for row in x), start=torch.zeros(()))


@torch.no_grad()
def test_marked_dims_of_equal_size_are_separated_once_they_differ(mesh: DeviceMesh) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.cos() @ y.sin()

    x, y = torch.randn(4, 6), torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(y, 1)
    sharded = parallelized(Product(), (x, y), mesh)
    for rows, columns, count in ((5, 5, 1), (5, 7, 2), (8, 3, 2)):
        x, y = torch.randn(rows, 6), torch.randn(6, columns)
        torch.testing.assert_close(sharded(x, y), Product()(x, y))
        assert programs(sharded) == count


def test_the_log_names_hooks_and_parameters_that_make_another_program(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    sharded = parallelized(Scored(), data(4), mesh, train=True)

    def again(*args: Tensor) -> str:
        caplog.clear()
        sharded(*args)
        (said,) = [line for line in caplog.messages if "planning again" in line]
        return said.removeprefix("planning again for training: args[0] (4, 8), args[1] (4, 4)")

    handle = sharded.inner.register_forward_hook(lambda module, args, out: out * 2)
    assert again(*data(4)) == ", with the forward hook of inner"
    other = sharded.inner.register_forward_hook(lambda module, args, out: out * 3)
    handle.remove()
    assert again(*data(4)) == ", with the forward hook of inner, without the forward hook of inner"
    sharded.inner.bias.requires_grad_(False)
    assert again(*data(4)) == ", requires_grad=False of inner.bias"
    other.remove()
