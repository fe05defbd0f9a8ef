"""The state of a module that each call checks: submodules, parameters, buffers, hooks. Changes are seen; if none, nothing is recomputed."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel

import fxshard
from fxshard.errors import RunError
from fxshard.runtime.module.module_state import ModuleState, same_hooks
from fxshard.runtime.module.parameters import shard_parameters


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture
def model(mesh: DeviceMesh) -> Any:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU()))
    shard_parameters(made, {}, mesh, torch.device("cpu"))
    return made


PARTS: dict[str, Callable[[Any], Any]] = {
    "another child": lambda m: m.__setitem__(1, nn.BatchNorm1d(2)),
    "one more": lambda m: m.append(nn.ReLU()),
    "one less": lambda m: m.__delitem__(1),
    "below": lambda m: m[2].append(nn.ReLU()),
    "in a leaf": lambda m: setattr(m[0], "extra", nn.ReLU()),
    "moved": lambda m: (m.append(m[2][0]), m[2].__delitem__(0)),
    "another table": lambda m: setattr(m[2], "_modules", OrderedDict(other=nn.ReLU())),
    "a parameter more": lambda m: setattr(m[0], "scale", nn.Parameter(torch.ones(1))),
    "a parameter less": lambda m: delattr(m[0], "bias"),
}


@pytest.mark.parametrize("name", PARTS)
def test_every_change_of_parts_is_seen(name: str, model: Any, mesh: DeviceMesh) -> None:
    state = ModuleState(model, mesh)
    model.eval()
    model[0].weight.requires_grad_(False)
    assert state.same_structure()
    PARTS[name](model)
    assert not state.same_structure()
    state.refresh()
    assert state.same_structure()


def place(m: Any, mesh: DeviceMesh, *placements: Any) -> None:
    m[0].weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, placements, src_data_rank=None))


CHANGES: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "a layout": lambda m, mesh: place(m, mesh, Shard(1)),
    "a dtype": lambda m, mesh: m[0].double(),
    "a buffer's dtype": lambda m, mesh: setattr(m[1], "running_mean", m[1].running_mean.double()),
    "a buffer's shape": lambda m, mesh: setattr(m[1], "running_mean", torch.ones(3)),
    "no buffer": lambda m, mesh: setattr(m[1], "running_mean", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_layout_is_seen(name: str, model: Any, mesh: DeviceMesh) -> None:
    state = ModuleState(model, mesh)
    before = state.snapshot()
    assert state.snapshot() is before
    model[0].bias.requires_grad_(False)
    assert state.snapshot().layouts is before.layouts and state.snapshot().trainable != before.trainable
    place(model, mesh, Replicate())
    model[1].running_mean = torch.full((2,), 3.0)
    assert state.snapshot().layouts == before.layouts
    CHANGES[name](model, mesh)
    assert state.snapshot().layouts != before.layouts and state.same_structure()


def test_a_parameter_that_is_not_on_the_mesh_is_named(model: Any, mesh: DeviceMesh) -> None:
    other, pending = DeviceMesh("cpu", [1, 0]), distribute_tensor(torch.ones(2, 2), mesh, [Replicate()], src_data_rank=None)
    state = ModuleState(model, mesh)
    for value, said in (
        (torch.ones(2, 2), "parameter 0.weight is a plain tensor, assigned after parallelize"),
        (distribute_tensor(torch.ones(2, 2), other, [Replicate()], src_data_rank=None), "is on another mesh"),
        (type(pending).from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False), "0.weight, assigned .* a sum that is pending"),
    ):
        model[0].weight = nn.Parameter(value)
        with pytest.raises(RunError, match=said) as caught:
            state.snapshot()
        assert caught.value.where == "0.weight" and "distribute_tensor" in str(caught.value.remedy)


def hook(*_: Any) -> None: ...


HOOKS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a submodule's": (lambda m: m[0].register_forward_hook(hook), True),
    "deeper": (lambda m: m[2][0].register_forward_pre_hook(hook), True),
    "of the backward": (lambda m: m[0].register_full_backward_hook(hook), True),
    "before the backward": (lambda m: m[0].register_full_backward_pre_hook(hook), True),
    "of all modules": (lambda m: nn.modules.module.register_module_forward_hook(hook), True),
    "the model's own": (lambda m: m.register_forward_hook(hook), False),
}


@pytest.mark.parametrize("name", HOOKS)
def test_which_hooks_affect_the_program(name: str, model: Any, mesh: DeviceMesh) -> None:
    register, counts = HOOKS[name]
    state = ModuleState(model, mesh)
    with register(model):
        first = state.hooks()
        assert bool(first) is counts and same_hooks((), first) is not counts
    assert state.hooks() == ()
    with register(model):
        assert same_hooks(state.hooks(), first)


def test_different_hooks_compare_unequal(model: Any, mesh: DeviceMesh) -> None:
    state, found = ModuleState(model, mesh), []
    for call, with_kwargs in ((hook, False), (hook, True), (functools.partial(hook), False)):
        with model[0].register_forward_hook(call, with_kwargs=with_kwargs):
            found.append(state.hooks())
    with model[1].register_forward_hook(hook):
        found.append(state.hooks())
    assert not any(same_hooks(a, b) for i, a in enumerate(found) for b in found[:i])


def test_a_forward_prints_one_line(mesh: DeviceMesh) -> None:
    x = torch.ones(4, 2)
    sharded = fxshard.parallelize(nn.Linear(2, 2), (x,), mesh, compiler="eager", pins={"weight": "S(0)"}, timeout=60.0)
    assert repr(sharded.forward) == "<sharded forward of Linear on axis0=2, programs made: 1>"
    waiting = fxshard.parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    assert repr(waiting.forward) == "<forward of Linear, which is planned at its first call>"
