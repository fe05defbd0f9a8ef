"""In-place writes to memory that is shared only at some sizes: these sizes have their own programs, and results equal eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import fxshard
from fxshard.errors import RunError, SizesError, StaticDimError
from fxshard.passes.trace.trace import trace
from fxshard.shapes import dynamic_dims

DIMS = {"x": {0: "b", 1: "t"}}
MESH = fxshard.Mesh({"a": 1})


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def inputs(*shape: int) -> tuple[Tensor]:
    return (torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape),)


def guards(function: Callable[[Tensor], Tensor], batch: int = 4, length: int = 6) -> list[str]:
    model, args = Model(function), inputs(batch, length, 4)
    family = trace(model, args, train=False, dynamic=dynamic_dims(model, args, {}, DIMS)).family
    assert family is not None and all("test_shared_memory.py" in guard.where for guard in family.guards)
    return sorted(guard.condition for guard in family.guards)


def residual(y: Tensor) -> Tensor:
    h = F.relu(y.transpose(0, 1).contiguous(), inplace=True)
    return y + h.transpose(0, 1)


def reshaped(y: Tensor) -> Tensor:
    h = y.transpose(0, 1).reshape(-1, 4)
    h[0] = 0
    return y


def chained(y: Tensor) -> Tensor:
    y.transpose(0, 1).contiguous().transpose(0, 1).flatten(0, 1).mul_(3)
    return y


def base_written(y: Tensor) -> Tensor:
    h = y.transpose(0, 1).flatten(0, 1)
    y.mul_(3)
    return h


def cut(y: Tensor) -> Tensor:
    y[:, :-1].contiguous().mul_(3)
    return y


def expanded(y: Tensor) -> Tensor:
    row = y[0, 0] * 2
    h = row.expand(y.shape[0], 4).contiguous()
    h += 1
    return row + h


def swapped(y: Tensor) -> Tensor:
    y.transpose(0, 1).reshape(y.shape).mul_(3)
    return y


SHARED = {
    residual: ["Ne(b, 1)", "Ne(t, 1)"],
    reshaped: ["Ne(b, 1)", "Ne(t, 1)"],
    chained: ["Ne(b, 1)", "Ne(t, 1)"],
    base_written: ["Ne(b, 1)", "Ne(t, 1)"],
    expanded: ["Ne(b, 1)"],
    swapped: ["Ne(b, 1)", "Ne(t, 1)", "Ne(t, b)"],
    cut: ["Ne(b, 1)"],
}


@pytest.mark.parametrize("function", SHARED)
def test_a_write_with_an_effect_is_a_guard(function: Callable[[Tensor], Tensor]) -> None:
    assert guards(function) == SHARED[function]


def unread(y: Tensor) -> Tensor:
    return y.transpose(0, 1).contiguous().relu_()


def written_before(y: Tensor) -> Tensor:
    y.mul_(3)
    return y + y.transpose(0, 1).contiguous().transpose(0, 1)


def written_elsewhere(y: Tensor) -> Tensor:
    return y + y.transpose(0, 1).contiguous().transpose(0, 1) + y.cos().relu_()


@pytest.mark.parametrize("function", [unread, written_before, written_elsewhere])
def test_without_a_write_that_has_an_effect_there_is_no_guard(function: Callable[[Tensor], Tensor]) -> None:
    assert guards(function) == []


def test_a_file_names_the_line() -> None:
    model = Model(residual)
    program = fxshard.export(model, inputs(4, 6, 4), MESH, dynamic_shapes=DIMS, cache=False)
    for shape in ((3, 5, 4), (2, 2, 4)):
        found = fxshard.simulate(program, inputs(*shape), weights=dict(model.named_parameters())).outputs
        torch.testing.assert_close(found, model(*inputs(*shape)).detach())
    with pytest.raises(SizesError, match=r"b != 1 \(.*test_shared_memory.py:\d+ \(memory that an in-place write shares"):
        fxshard.simulate(program, inputs(1, 5, 4))


def test_an_example_of_one_row_fixes_the_dim() -> None:
    with pytest.raises(StaticDimError, match=r"takes for granted that b == 1.*test_shared_memory.py"):
        guards(residual, batch=1)
    with pytest.raises(StaticDimError, match=r"takes for granted that b == 5.*test_shared_memory.py"):
        guards(swapped, batch=5, length=5)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1, x.shape[-1]),
    "flatten": lambda x: x.flatten(0, 1),
    "ravel": lambda x: x.ravel(),
    "swapped": lambda x: x.reshape(x.shape[1], x.shape[0], x.shape[2]),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, 1),
    "half": lambda x: x[:, : x.shape[1] // 2 + 1],
    "rest": lambda x: x[1:] if x.shape[0] > 1 else x,
    "columns": lambda x: x[..., :2],
    "back": lambda x: x.transpose(0, -1).transpose(0, -1),
}
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy": lambda y, h: h.mul_(3),
    "one of the copy": lambda y, h: h.select(0, 0).fill_(5),
    "base": lambda y, h: y.add_(1),
    "relu": lambda y, h: F.relu(h, inplace=True),
    "nothing": lambda y, h: None,
}


def traced_at(model: nn.Module, shape: tuple[int, ...]) -> fxshard.ShardedProgram:
    """The program for a call of that shape. As in ``parallelize``, dims that the model fixes are static."""
    dims: dict[int, str] = {0: "b", 1: "t"}
    while True:
        try:
            plan = fxshard.plan(model, inputs(*shape), MESH, dynamic_shapes={"x": dims} if dims else None, train=False, cache=False)
            return fxshard.lower(model, inputs(*shape), plan, dynamic_shapes={"x": dims} if dims else None)
        except StaticDimError as error:
            dims = {d: name for d, name in dims.items() if name != error.dim}


def check(view: str, made: str, write: str, sizes: list[tuple[int, int]]) -> None:
    """Runs each size on the first program that serves it, and compares with eager torch."""

    def function(y: Tensor) -> Tensor:
        h = COPIES[made](VIEWS[view](y))
        WRITES[write](y, h)
        return torch.cat([y.flatten(), h.flatten()])

    model, programs = Model(function), []
    for batch, length in [*sizes, (1, 4), (4, 1), (1, 1)]:
        args = inputs(batch, length, 4)
        expected = copy.deepcopy(model)(*args).detach()
        for program in (*programs, None):
            if program is None:
                programs.append(program := traced_at(model, (batch, length, 4)))
            try:
                found = fxshard.simulate(program, args, weights=dict(model.named_parameters())).outputs
            except (SizesError, RunError):
                continue
            torch.testing.assert_close(found, expected, msg=f"{view}, {made}, {write} at {batch} x {length}")
            break
        else:
            raise AssertionError("no program serves the size for which it was made")


CHOICES = (
    st.sampled_from(sorted(VIEWS)),
    st.sampled_from(sorted(COPIES)),
    st.sampled_from(sorted(WRITES)),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=3, max_size=3),
)


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(*CHOICES)
def test_as_eager_at_any_size(view: str, made: str, write: str, sizes: list[tuple[int, int]]) -> None:
    check(view, made, write, sizes)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(*CHOICES)
def test_as_eager_at_many_sizes(view: str, made: str, write: str, sizes: list[tuple[int, int]]) -> None:
    check(view, made, write, sizes)
