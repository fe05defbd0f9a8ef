"""Optimizer steps on local tensors: bit for bit the parameters and state of a step on DTensors, without DTensor dispatch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard._torch_compat import TorchDispatchMode
from fxshard.layout.layouts import Layout, local_shape
from fxshard.runtime.optim.local_steps import ELEMENTWISE, step_locally

LAYOUTS = [((5, 3), "S(0)"), ((2, 3), "S(0)"), ((4,), "R"), ((), "R"), ((3, 7), "S(1)")]
"""On the last of three ranks: a short shard, an empty one, two replicas, an uneven shard on dim 1."""


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=2, world_size=3)
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


def tensors(mesh: DeviceMesh, seed: int) -> list[DTensor]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for shape, text in LAYOUTS:
        layout = Layout.parse(text)
        local = torch.randn(local_shape(shape, layout, (3,), (2,)), generator=draw)
        stride = torch.empty(shape).stride()
        made.append(DTensor.from_local(local, mesh, tuple(layout), run_check=False, shape=torch.Size(shape), stride=stride))
    return made


def parameters(mesh: DeviceMesh, ours: bool) -> list[nn.Parameter]:
    made = [nn.Parameter(t) for t in tensors(mesh, 0)]
    if ours:
        step_locally(made)
    return made


def steps(optimizer: optim.Optimizer, mesh: DeviceMesh, numbers: range = range(3)) -> None:
    for i in numbers:
        optimizer.zero_grad()
        (group,) = optimizer.param_groups
        for k, (p, grad) in enumerate(zip(group["params"], tensors(mesh, i + 1), strict=True)):
            p.grad = None if (i, k) == (0, 2) else grad
        optimizer.step()


def assert_alike(ours: optim.Optimizer, theirs: optim.Optimizer) -> None:
    """Parameters and state are equal in type, layout and bits."""
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        mine, other = ours.state[p], theirs.state[q]
        assert list(mine) == list(other)
        for name, value in other.items():
            assert type(mine[name]) is type(value)
            if isinstance(value, DTensor):
                assert (mine[name].placements, mine[name].shape) == (value.placements, value.shape)
                assert torch.equal(mine[name].to_local(), value.to_local())
            else:
                assert mine[name] == value


class Seen(TorchDispatchMode):
    """Counts operators that get a DTensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += DTensor in types
        return func(*args, **(kwargs or {}))


SETTINGS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    *((kind, {"foreach": foreach}) for kind in sorted(ELEMENTWISE - {optim.Rprop}, key=str) for foreach in (False, True)),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True, "foreach": True}),
    (optim.AdamW, {"amsgrad": True, "weight_decay": 0.1, "fused": True}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "foreach": True}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=lambda v: v.__name__ if isinstance(v, type) else ",".join(v))
def test_steps_equal_those_on_dtensors_without_their_dispatch(kind: Any, settings: dict[str, Any], mesh: DeviceMesh) -> None:
    ours, theirs = (kind(parameters(mesh, mark), lr=0.1, **settings) for mark in (True, False))
    steps(ours, mesh)
    steps(theirs, mesh)
    assert_alike(ours, theirs)
    with Seen() as seen:
        ours.step()
    assert seen.count == 0
    theirs.step()
    assert_alike(ours, theirs)


CANNOT: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Rprop, {"foreach": False}),
    (optim.Rprop, {"foreach": True}),
    (optim.SGD, {"fused": True, "weight_decay": 0.1}),
]
"""Optimizers with operators that DTensor has no rule for: index_put_, _foreach_copy_, _fused_sgd_."""


@pytest.mark.parametrize(("kind", "settings"), CANNOT)
def test_optimizers_that_dtensor_cannot_step(kind: Any, settings: dict[str, Any], mesh: DeviceMesh) -> None:
    """They are compared with plain tensors."""
    ours = kind(parameters(mesh, True), lr=0.1, **settings)
    plain = kind([nn.Parameter(p.to_local().clone()) for p in parameters(mesh, False)], lr=0.1, **settings)
    steps(ours, mesh)
    for i in range(3):
        for k, (p, grad) in enumerate(zip(plain.param_groups[0]["params"], tensors(mesh, i + 1), strict=True)):
            p.grad = None if (i, k) == (0, 2) else grad.to_local()
        plain.step()
    for p, q in zip(ours.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        assert torch.equal(p.to_local(), q)
        assert all(isinstance(value, DTensor) for name, value in ours.state[p].items() if name != "step")


def test_steps_continue_from_loaded_state(mesh: DeviceMesh) -> None:
    first, second, theirs = (optim.Adam(parameters(mesh, mark), foreach=True) for mark in (True, True, False))
    steps(first, mesh)
    steps(theirs, mesh)
    steps(second, mesh, range(1, 2))
    with torch.no_grad():
        for p, q in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            p.copy_(q)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(second, mesh, range(3, 5))
    steps(theirs, mesh, range(3, 5))
    assert_alike(second, theirs)


def test_no_step_after_zero_grad(mesh: DeviceMesh) -> None:
    optimizer = optim.Adam(parameters(mesh, True), foreach=True)
    steps(optimizer, mesh)
    optimizer.zero_grad()
    before = [p.to_local().clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.step()
    assert all(torch.equal(p.to_local(), b) for p, b in zip(optimizer.param_groups[0]["params"], before, strict=True))


def test_a_step_that_raises_leaves_the_optimizer_as_it_was(mesh: DeviceMesh) -> None:
    optimizer, theirs = (optim.Adam(parameters(mesh, mark), foreach=True) for mark in (True, False))
    steps(optimizer, mesh)
    steps(theirs, mesh)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    assert_alike(optimizer, theirs)
    steps(optimizer, mesh, range(3, 4))
    steps(theirs, mesh, range(3, 4))
    assert_alike(optimizer, theirs)


def test_hooks_of_the_user_see_dtensors_and_may_change_gradients(mesh: DeviceMesh) -> None:
    def halve(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            assert isinstance(p, DTensor)
            p.grad = None if p.grad is None else p.grad / 2

    ours, theirs = (optim.SGD(parameters(mesh, mark), momentum=0.9) for mark in (True, False))
    for optimizer in (ours, theirs):
        optimizer.register_step_pre_hook(halve)
        steps(optimizer, mesh)
    assert_alike(ours, theirs)


def test_a_closure_gets_dtensors(mesh: DeviceMesh) -> None:
    ours, theirs = (optim.SGD(parameters(mesh, mark), lr=0.1) for mark in (True, False))
    for optimizer in (ours, theirs):

        def closure(optimizer: optim.Optimizer = optimizer) -> float:
            for p, grad in zip(optimizer.param_groups[0]["params"], tensors(mesh, 1), strict=True):
                assert isinstance(p, DTensor)
                p.grad = grad
            return 3.0

        assert optimizer.step(closure) == 3.0
    assert_alike(ours, theirs)


def test_other_cases_step_on_dtensors(mesh: DeviceMesh) -> None:
    """A subclass of an optimizer, other DTensor parameters, a gradient in another layout than its parameter."""

    class Mine(optim.Adam):
        pass

    class Other(optim.SGD):
        pass

    for optimizer in (Mine(parameters(mesh, True)), Other(parameters(mesh, True), lr=0.1), optim.Adam(parameters(mesh, False))):
        steps(optimizer, mesh)
        with Seen() as seen:
            optimizer.step()
        assert seen.count
    (p, *_) = parameters(mesh, True)
    optimizer = optim.SGD([p], lr=0.5)
    p.grad = DTensor.from_local(torch.ones(5, 3), mesh, [Replicate()], run_check=False)
    before = p.to_local().clone()
    optimizer.step()
    assert torch.equal(p.to_local(), before - 0.5)
    assert p.placements == (Shard(0),)


def test_plain_parameters_with_sharded_ones(mesh: DeviceMesh) -> None:
    ours, plain = parameters(mesh, True)[0], nn.Parameter(torch.ones(3))
    optimizer = optim.Adam([ours, plain], foreach=True)
    ours.grad, plain.grad = tensors(mesh, 1)[0], torch.ones(3)
    optimizer.step()
    alone = optim.Adam([nn.Parameter(torch.ones(3))])
    alone.param_groups[0]["params"][0].grad = torch.ones(3)
    alone.step()
    torch.testing.assert_close(plain, alone.param_groups[0]["params"][0])
    assert type(optimizer.state[plain]["exp_avg"]) is torch.Tensor
    assert isinstance(optimizer.state[ours]["exp_avg"], DTensor)


def test_a_compiled_step(mesh: DeviceMesh) -> None:
    ours, theirs = (optim.SGD(parameters(mesh, mark), lr=0.1) for mark in (True, False))
    steps(ours, mesh)
    steps(theirs, mesh)
    torch.compile(ours.step, backend="eager")()
    theirs.step()
    assert_alike(ours, theirs)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler(fused: bool, mesh: DeviceMesh) -> None:
    """Scaled gradients, and a step that is skipped because a gradient is infinite."""
    ours, theirs = (optim.Adam(parameters(mesh, mark), fused=fused) for mark in (True, False))
    for optimizer in (ours, theirs):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(3):
            scaler.scale(torch.ones(()))
            for p, grad in zip(optimizer.param_groups[0]["params"], tensors(mesh, i + 1), strict=True):
                p.grad = grad * 8 if i != 1 else torch.full_like(grad, torch.inf)
            before = optimizer.param_groups[0]["params"][0].to_local().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(optimizer.param_groups[0]["params"][0].to_local(), before) == (i == 1)
        assert scaler.get_scale() == 4.0
    assert_alike(ours, theirs)
