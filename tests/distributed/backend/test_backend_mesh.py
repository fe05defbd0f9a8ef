"""The backend without the option ``mesh``, on two gloo ranks: calls of many kinds give the numbers of one device."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fxshard.runtime.backend.backend as backend
from fxshard.errors import RunError
from tests.distributed.backend.test_backend import MLP, close, distributed_parameters, megatron, mesh_of_two, train_both
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


def compiled(function: Any, compiler: str = "eager", **options: Any) -> Any:
    return torch.compile(function, backend="fxshard", options={"compiler": compiler, "timeout": 60.0, **options})


def programs(step: Any) -> list[Any]:
    """The programs that the backend makes during ``step()``."""
    made: list[Any] = []
    original = backend.compile_program
    backend.compile_program = lambda bound, *how: made.append(bound.program) or original(bound, *how)
    try:
        step()
    finally:
        backend.compile_program = original
    return made


def default_group() -> None:
    """The default group is a mesh with one axis, "world": a training step through Inductor, with sharded computation."""
    model, x = MLP(), torch.randn(8, 16)
    function = compiled(model, "inductor", pins={"einsum": "S(0)"})
    made = programs(lambda: train_both(model, function, copy.deepcopy(model), lambda m: m(x).pow(2).mean()))
    assert [str(p.mesh) for p in made] == ["world=2"] and made[0].collectives


def mesh_of_a_with_block() -> None:
    """The program has the axes of the mesh in whose ``with`` block it is called; its numbers are those of one device."""
    model, x = MLP(), torch.randn(8, 16)
    function = compiled(model)
    made = []
    for shape, names in (((2, 1), ("dp", "tp")), ((1, 2), ("pp", "cp"))):
        with init_device_mesh("cpu", shape, mesh_dim_names=names):
            made += programs(lambda: close(function(x), model(x)))
    assert [str(p.mesh) for p in made] == ["dp=2,tp=1", "pp=1,cp=2"]


def mesh_of_dtensors() -> None:
    """The mesh of DTensor parameters, not that of the ``with`` block."""
    model, values = MLP(), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    distributed_parameters(model, megatron)
    x = distribute_tensor(values, mesh_of_two(), [Replicate()])
    function = compiled(model)
    with init_device_mesh("cpu", (2,), mesh_dim_names=("other",)):
        step = lambda: train_both(model, function, reference, lambda m: m(x).pow(2).mean(), lambda m: m(values).pow(2).mean())  # noqa: E731
        assert {str(p.mesh) for p in programs(step)} == {"tp=2"}


def ranks_on_different_meshes() -> None:
    """If only one rank is in the ``with`` block of a mesh, both raise an error."""
    function, mesh = compiled(lambda x: x * 2), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(RunError, match="mesh"):
        if mesh.get_local_rank():
            function(torch.ones(4))
        else:
            with mesh:
                function(torch.ones(4))


def views_and_changes() -> None:
    """Outputs that are views, and an argument changed in place: what the shards compute is written to the user's tensor."""

    def step(x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        total += y.sum(0)
        return y, y.t(), x[1:], total, total[:2]

    function, x, total = compiled(step, pins={"mul": "S(0)"}), torch.randn(5, 4), torch.zeros(4)
    z, other = x.clone(), total.clone()
    for _ in range(2):
        have, want = function(x, total), step(z, other)
        assert have[3] is total
        for outputs in (have, want):
            outputs[1].add_(1)
            outputs[2].mul_(2)
            outputs[4].zero_()
        for one, known in zip((*have, x, total), (*want, z, other), strict=True):
            close(one, known)


def from_another_thread() -> None:
    model, x, found = MLP(), torch.randn(8, 16), []
    function = compiled(model, pins={"einsum": "S(0)"})
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(torch.autograd.grad(function(x).square().mean(), model.up.weight)[0]))
        thread.start()
        thread.join()
    want = torch.autograd.grad(model(x).square().mean(), model.up.weight)[0]
    assert len(found) == 2
    for grad in found:
        close(grad, want)


def nested() -> None:
    model, x = nn.Sequential(MLP(), nn.Linear(16, 4)), torch.randn(8, 16)
    reference = copy.deepcopy(model)
    model[0] = compiled(model[0])
    train_both(model, compiled(model, pins={"einsum*": "S(0)"}), reference, lambda m: m(x).pow(2).mean())


def second_derivatives() -> None:
    """First derivatives are right and second ones are refused, for plain parameters and for DTensors."""
    for layouts in (None, lambda name: [Shard(0)]):
        model, values = MLP(), torch.randn(8, 16)
        want = torch.autograd.grad(model(values).square().mean(), list(model.parameters()))
        x: Any = values
        if layouts is not None:
            distributed_parameters(model, layouts)
            x = distribute_tensor(values, mesh_of_two(), [Replicate()])
        loss = compiled(model)(x).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        for grad, known in zip(grads, want, strict=True):
            assert isinstance(grad, DTensor) == (layouts is not None)
            close(grad, known)
        with pytest.raises(RunError, match="differentiated again"):
            sum(g.square().sum() for g in grads).backward()


found, test_two_ranks = two_ranks(
    default_group,
    mesh_of_a_with_block,
    mesh_of_dtensors,
    ranks_on_different_meshes,
    views_and_changes,
    from_another_thread,
    nested,
    second_derivatives,
)
