"""On two ranks, through each door: what must be alike and is not is an error on both, naming field and ranks, before any collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.errors import RunError
from fxshard.runtime.backend import backend
from fxshard.runtime.module import module
from fxshard.runtime.module.module import parallelize
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed

Door = Callable[[Tensor, DeviceMesh, str], Any]
"""A call of a model with an argument on a mesh, its product in a layout; on each rank perhaps another one."""


def odd(usual: Any, other: Any) -> Any:
    return other if dist.get_rank() == 1 else usual


def mesh(axis: str = "tp") -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def plan_for(x: Tensor, layout: str, train: bool = True) -> fxshard.ShardingPlan:
    layouts = {"input_layouts": "R", "output_layouts": "R", "pins": {"weight": "R", "bias": "R", "einsum": layout}}
    return fxshard.plan(linear(), (x,), fxshard.Mesh({"tp": 2}), train=train, **layouts)


def by_parallelize(x: Tensor, on: DeviceMesh, layout: str) -> Any:
    plan = {"plan": plan_for(x, layout)} if layout else {}
    return parallelize(linear(), (x,), on, compiler="eager", timeout=20.0, **plan)(x)


def by_compile(x: Tensor, on: DeviceMesh, layout: str) -> Any:
    torch._dynamo.reset()
    plan = {"plan": plan_for(x, layout)} if layout else {}
    return torch.compile(linear(), backend="fxshard", options={"mesh": on, "compiler": "eager", "timeout": 20.0, **plan})(x)


def by_bind(x: Tensor, on: DeviceMesh, layout: str) -> Any:
    first = torch.ones(4, 6)
    program = fxshard.export(linear(), (first,), fxshard.Mesh({"tp": 2}), plan=plan_for(first, layout or "R", train=False))
    return program.bind(on, compiler="eager", timeout=20.0)(x)


def differs(field: str, call: Callable[[], Any]) -> None:
    with pytest.raises(RunError, match=rf"the ranks differ in (the )?{field}.*: rank 0: (.|\n)*; rank 1: (.|\n)*of ranks 0-1"):
        call()


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _lowered_otherwise(lower_plan: Any) -> Any:
    """What rank 1 makes of the same plan is another program."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        program = lower_plan(*args, **kwargs)
        program.__dict__["hash"] = odd(program.hash, "another")
        return program

    return lower


def _fields(door: Door) -> None:
    x = torch.ones(4, 6)
    with put(torch, "__version__", odd(torch.__version__, "2.13.9")):
        differs("torch", lambda: door(x, mesh(), ""))
    differs("mesh", lambda: door(x, mesh(odd("tp", "dp")), ""))
    differs("shape", lambda: door(odd(x, torch.ones(8, 6)), mesh(), ""))
    differs("plan", lambda: door(x, mesh(), odd("S(0)", "R")))


def parallelized() -> None:
    _fields(by_parallelize)
    with put(module, "lower_plan", _lowered_otherwise(module.lower_plan)):
        differs("program", lambda: by_parallelize(torch.ones(4, 6), mesh(), ""))


def compiled() -> None:
    _fields(by_compile)
    with put(backend, "lower_plan", _lowered_otherwise(backend.lower_plan)):
        differs("program", lambda: by_compile(torch.ones(4, 6), mesh(), ""))


def bound() -> None:
    _fields(by_bind)
    x = torch.ones(4, 6)
    program = fxshard.export(linear(), (x,), fxshard.Mesh({"tp": 2}), plan=plan_for(x, "S(0)", train=False))
    differs("debug mode", lambda: program.bind(mesh(), compiler="eager", timeout=20.0, debug=odd(False, True)))
    program.__dict__["hash"] = odd(program.hash, "another")
    differs("program", lambda: program.bind(mesh(), compiler="eager", timeout=20.0))


found, test_two_ranks = two_ranks(parallelized, compiled, bound)
