"""Two ranks that differ where they must agree both raise an error, before any collective, that names the field and the ranks.

Tested for parallelize, torch.compile and bind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.errors import ConstraintError, RunError
from fxshard.runtime.backend import backend
from fxshard.runtime.module import module
from fxshard.runtime.module.module import parallelize
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed

EntryPoint = Callable[[Tensor, DeviceMesh, str], Any]
"""Runs a model on an argument and a mesh, with its product in a layout. The arguments may differ by rank."""


def by_rank(usual: Any, other: Any) -> Any:
    """``usual`` on rank 0, ``other`` on rank 1."""
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
    """``lower_plan``, but rank 1 gets a program with another hash."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        program = lower_plan(*args, **kwargs)
        program.__dict__["hash"] = by_rank(program.hash, "another")
        return program

    return lower


def _fields(run: EntryPoint) -> None:
    x = torch.ones(4, 6)
    with put(torch, "__version__", by_rank(torch.__version__, "2.13.9")):
        differs("torch", lambda: run(x, mesh(), ""))
    differs("mesh", lambda: run(x, mesh(by_rank("tp", "dp")), ""))
    differs("shape", lambda: run(by_rank(x, torch.ones(8, 6)), mesh(), ""))
    differs("plan", lambda: run(x, mesh(), by_rank("S(0)", "R")))


def options() -> None:
    """What decides the plan must be the same on both ranks: the first rank's alone would count."""
    x = torch.ones(4, 6)
    for given in (
        {"memory_limit": by_rank("1GB", "2GB")},
        {"pins": {"weight": by_rank("S(0)", "S(1)")}},
        {"parallel": by_rank("tp", "ddp")},
    ):
        (name,) = given
        differs(name, partial(parallelize, linear(), (x,), mesh(), compiler="eager", timeout=20.0, **given))
    torch._dynamo.reset()
    limit = {"memory_limit": by_rank("1GB", "2GB"), "mesh": mesh(), "compiler": "eager", "timeout": 20.0}
    differs("memory_limit", lambda: torch.compile(linear(), backend="fxshard", options=limit)(x))


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
    differs("debug mode", lambda: program.bind(mesh(), compiler="eager", timeout=20.0, debug=by_rank(False, True)))
    program.__dict__["hash"] = by_rank(program.hash, "another")
    differs("program", lambda: program.bind(mesh(), compiler="eager", timeout=20.0))


def failed_compilation() -> None:
    """What one rank cannot compile is an error on both, which names that rank; the ranks then go on together."""
    x = torch.ones(4, 6)

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no compiler here")

    for run, owner in ((by_parallelize, module), (by_compile, backend)):
        with (
            put(owner, "compile_program", by_rank(owner.compile_program, fails)),
            pytest.raises(Exception, match=by_rank("rank 1 could not make a program: ValueError: no compiler here", "no compiler here")),
        ):
            run(x, mesh(), "")
        torch.testing.assert_close(run(x, mesh(), ""), linear()(x))


def failed_plan() -> None:
    """A memory limit that no plan keeps is rank 0's error; the other rank says what it is, and who has the whole of it."""
    x = torch.ones(4, 6)
    whole = r"^nothing fits in memory_limit=(.|\n)*most of it in\n +tensor "
    short = r"^rank 0 could not plan: ConstraintError: nothing fits in (.|\n)* in \.\.\.\n(.|\n)*\(rank 0 has the whole error\)$"
    with pytest.raises(by_rank(ConstraintError, RunError), match=by_rank(whole, short)):
        parallelize(linear(), (x,), mesh(), compiler="eager", timeout=20.0, memory_limit=8)


found, test_two_ranks = two_ranks(parallelized, compiled, bound, failed_compilation, failed_plan, options)
