"""Steps with state on the host: bit for bit those without, and every byte of state is copied to the device and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import RunError
from fxshard.ops.host import counting
from fxshard.runtime.optim.host_state import on_host, place_on_host
from fxshard.runtime.optim.local_steps import ELEMENTWISE
from tests.runtime.optim.test_local_steps import assert_alike, parameters, tensors


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=2, world_size=3)
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


def optimizers(mesh: DeviceMesh, kind: type[optim.Optimizer], options: dict[str, Any], host: range) -> list[optim.Optimizer]:
    """One whose parameters with numbers in ``host`` have their state there, and one without."""
    made = []
    for away in (host, range(0)):
        ours = parameters(mesh, True)
        for k in away:
            place_on_host(ours[k], "optimizer")
        made.append(kind([{"params": ours[:2], "lr": 0.2}, {"params": ours[2:]}], lr=0.1, **options))  # type: ignore[call-arg]
    return made


def run(optimizer: optim.Optimizer, mesh: DeviceMesh, numbers: range = range(3)) -> None:
    """Steps with random gradients; in the first, one parameter has none."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for i in numbers:
        for k, (p, grad) in enumerate(zip(every, tensors(mesh, i + 1), strict=True)):
            p.grad = None if (i, k) == (0, 2) else grad
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=str))
def test_steps_are_equal_bit_for_bit(kind: type[optim.Optimizer], foreach: bool, mesh: DeviceMesh) -> None:
    options = {"foreach": foreach, **({"momentum": 0.9} if kind is optim.SGD else {})}
    ours, theirs = optimizers(mesh, kind, options, range(0, 5, 2))
    run(ours, mesh)
    run(theirs, mesh)
    for group in (0, 1):
        ours.param_groups[0], theirs.param_groups[0] = ours.param_groups[group], theirs.param_groups[group]
        assert_alike(ours, theirs)


def test_each_byte_of_state_is_copied_there_and_back(mesh: DeviceMesh) -> None:
    ours, _ = optimizers(mesh, optim.AdamW, {}, range(5))
    with counting() as traffic:
        run(ours, mesh, range(1))
    assert not traffic.inward and traffic.outward  # the first step makes the state
    run(ours, mesh, range(1, 2))
    with counting() as traffic:
        run(ours, mesh, range(2, 3))
    every = sum(p.to_local().nbytes for group in ours.param_groups for p in group["params"])
    assert (traffic.inward, traffic.outward, traffic.copies) == (2 * every, 2 * every, 2 * 2 * 5)


def test_state_is_saved_and_loaded(mesh: DeviceMesh) -> None:
    ours, theirs = optimizers(mesh, optim.Adam, {}, range(5))
    run(ours, mesh)
    state = ours.state_dict()
    assert all(isinstance(one["exp_avg"], DTensor) for one in state["state"].values())
    theirs.load_state_dict(copy.deepcopy(state))
    again, _ = optimizers(mesh, optim.Adam, {}, range(5))
    again.load_state_dict(copy.deepcopy(state))
    for mine, other in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"].to_local(), other["exp_avg_sq"].to_local())
    for one in (again, theirs):
        run(one, mesh, range(1))
    again.param_groups[0], theirs.param_groups[0] = again.param_groups[1], theirs.param_groups[1]
    assert_alike(again, theirs)


def test_a_step_through_dtensor_is_refused(mesh: DeviceMesh) -> None:
    class Own(optim.Adam):
        pass

    for kind, arguments, options in ((Own, (), {}), (optim.Adam, (lambda: 0.0,), {}), (optim.Adam, (), {"capturable": True})):
        ours, _ = optimizers(mesh, kind, options, range(1))
        with pytest.raises(RunError, match="cannot step on 1 parameters whose state the plan holds on the host"):
            ours.step(*arguments)


def test_parallelize_plans_with_what_may_be_on_the_host() -> None:
    """The first program decides; a later one, for inference, keeps what is on the host there."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model, x = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))), torch.ones(4, 8)
        options: dict[str, Any] = {"optimizer": "adamw", "pins": {"*.weight": "R"}, "input_layouts": "S(0)", "cache": False}
        free = fxshard.plan(model, (x,), fxshard.Mesh({"a": 2}), **options)
        limit = int(0.8 * sum(free.memory.values()))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        more = {"memory_limit": limit, "offload": "parameters", "compiler": "eager"}
        sharded = fxshard.parallelize(model, (x,), mesh, **options, **more)
        (program,) = sharded.forward.programs
        away = {one.node for one in program.plan.offloaded}
        assert away and sum(program.plan.memory.values()) <= limit
        assert {program.plan.node_of(n) for n, p in sharded.named_parameters() if on_host(p) == "parameters"} == away
        sharded(x).sum().backward()
        optim.AdamW(sharded.parameters()).step()
        with torch.no_grad(), counting() as traffic:
            sharded(x)
        assert traffic.inward == sum(p.to_local().nbytes for p in sharded.parameters() if on_host(p) == "parameters")
    finally:
        dist.destroy_process_group()
