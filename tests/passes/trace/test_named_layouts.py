"""DTensor's calls in a forward: layouts that they name are planned, numbers are one device's, what cannot be planned is refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.errors import TraceError


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A DeviceMesh for DTensor's calls. Planning itself needs no process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Calls(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any], mesh: DeviceMesh) -> None:
        super().__init__()
        self.function, self.mesh = function, mesh
        self.weight = nn.Parameter(torch.arange(24.0, dtype=torch.float64).reshape(4, 6))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


X = torch.arange(24.0, dtype=torch.float64).reshape(6, 4).sin()


def planned(function: Callable[[Any, Tensor], Any], mesh: DeviceMesh, axes: dict[str, int] | None = None, shard: bool = False) -> Any:
    model = Calls(function, mesh)
    if shard:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    return model, fxshard.plan(model, (X,), fxshard.Mesh(axes or {"tp": 2}), train=False, cache=False)


def chain(model: Any, x: Tensor) -> Tensor:
    y = DTensor.from_local(x, model.mesh, [Replicate()]).redistribute(model.mesh, [Shard(0)])
    local = (y @ model.weight).redistribute(placements=[Shard(-1)]).to_local()
    return DTensor.from_local(local.exp(), model.mesh, [Shard(1)]).full_tensor()


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_values_have_the_layouts_that_calls_name(mesh: DeviceMesh, axes: dict[str, int]) -> None:
    model, plan = planned(chain, mesh, axes)
    tp = list(axes).index("tp")
    named = [spec.outputs[0][tp] for name, spec in plan.specs.items() if name.startswith("placed")]
    assert named == [Replicate(), Shard(0), Shard(1), Shard(1)]
    torch.testing.assert_close(fxshard.simulate(model, (X,), plan).outputs, (X @ model.weight).exp().detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "function", [lambda m, x: x @ m.weight.full_tensor(), lambda m, x: x @ m.weight.redistribute(placements=[Replicate()]).to_local()]
)
def test_calls_on_parameters(mesh: DeviceMesh, function: Any) -> None:
    """Parameters that are DTensors know their mesh. (A fake group distributes nothing: the shard here is that of rank 0.)"""
    model, plan = planned(function, mesh, shard=True)
    assert all(spec.outputs[0] == (Replicate(),) for name, spec in plan.specs.items() if name.startswith("placed"))
    weight = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    program = fxshard.lower(model, (X,), plan)
    torch.testing.assert_close(fxshard.simulate(program, (X,), weights={"weight": weight}).outputs, X @ weight, rtol=1e-9, atol=1e-12)
    assert not hasattr(torch.Tensor, "full_tensor")


def test_to_local_of_a_sharded_parameter_is_whole_and_says_so(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model, plan = planned(lambda m, x: x @ m.weight.to_local(), mesh, shard=True)
    assert [r.getMessage() for r in caplog.records if "to_local() of parameter weight is the whole parameter" in r.getMessage()]
    weight = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    found = fxshard.simulate(fxshard.lower(model, (X,), plan), (X,), weights={"weight": weight}).outputs
    torch.testing.assert_close(found, X @ weight, rtol=1e-9, atol=1e-12)


def whole_of(model: Any, x: Tensor) -> DTensor:
    return DTensor.from_local(x, model.mesh, [Replicate()])


SHARDED: dict[str, Callable[[Any, Tensor], Any]] = {
    "reduced": lambda m, x: whole_of(m, x).redistribute(m.mesh, [Shard(1)]).to_local().amax(1),
    "returned": lambda m, x: whole_of(m, x).redistribute(m.mesh, [Shard(1)]).to_local() * 2,
    "unknown": lambda m, x: (whole_of(m, x) @ m.weight).to_local().relu(),
}
SAME: dict[str, Callable[[Any, Tensor], Any]] = {
    "returned": lambda m, x: whole_of(m, x).redistribute(m.mesh, [Shard(1)]).to_local().clone(),
    "elementwise": chain,
    "whole": lambda m, x: (whole_of(m, x) @ m.weight).redistribute(m.mesh, [Replicate()]).to_local().amax(1),
}


@pytest.mark.parametrize("name", SHARDED)
def test_computing_with_a_part_of_a_value_says_that_it_is_whole(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, name: str) -> None:
    planned(SHARDED[name], mesh)
    (said,) = [r.getMessage() for r in caplog.records if "is computed with the whole value here" in r.getMessage()]
    assert re.match(r".*test_named_layouts.py:\d+: .*to_local\(\)", said)


@pytest.mark.parametrize("name", SAME)
def test_parts_that_give_the_same_as_whole_values_say_nothing(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture, name: str) -> None:
    model = Calls(SAME[name], mesh)
    fxshard.plan(model, (X,), fxshard.Mesh({"tp": 2}), cache=False)
    assert "computed with the whole value" not in caplog.text


def summed_by_hand(model: Any, x: Tensor) -> Tensor:
    return funcol.all_reduce((whole_of(model, x) @ model.weight).to_local(), "sum", model.mesh.get_group())


def test_a_collective_of_the_users_is_refused_by_line(mesh: DeviceMesh) -> None:
    with pytest.raises(
        TraceError, match=r"(?s)calls a collective, _c10d_functional.all_reduce.*where: .*test_named_layouts.py.*all_reduce.*leave"
    ):
        planned(summed_by_hand, mesh)


def test_a_sharded_vector_that_no_call_places_decides_the_layout_of_eager_execution(mesh: DeviceMesh) -> None:
    """Eager DTensor gives (6, 2), sharded as the vector; the replicated (6, 4) would be another result."""
    model = Calls(lambda m, x: torch.where(m.weight > 2, y := DTensor.from_local(x, m.mesh, [Replicate()]), y * 2).to_local(), mesh)
    for placement, refused in ((Shard(0), True), (Replicate(), False)):
        model.weight = nn.Parameter(distribute_tensor(torch.arange(4.0, dtype=torch.float64), mesh, [placement]))
        with pytest.raises(TraceError, match="does not name") if refused else contextlib.nullcontext():
            fxshard.plan(model, (X,), fxshard.Mesh({"tp": 2}), train=False, cache=False)


def meshes_of_values(model: Any, x: Tensor) -> Tensor:
    """The meshes of a parameter, of a call's result and of what is computed from that name the mesh of calls; plain tensors have none."""
    weight = DTensor.from_local(model.weight.full_tensor(), model.weight.device_mesh, [Replicate()])
    scores = distribute_tensor(x @ weight.full_tensor(), weight.device_mesh, [Shard(1)]).sin()
    ones = distribute_tensor(
        torch.ones_like(x) if hasattr(x, "device_mesh") else torch.ones_like(x) * 2, model.weight.device_mesh, [Shard(0)]
    )
    return scores.redistribute(scores.device_mesh, [Shard(0)]).full_tensor() + ones.full_tensor().sum()


def test_device_mesh_of_values_in_a_forward(mesh: DeviceMesh) -> None:
    model, plan = planned(meshes_of_values, mesh, shard=True)
    named = [spec.outputs[0] for name, spec in plan.specs.items() if name.startswith("placed")]
    assert named == [(Replicate(),), (Shard(1),), (Shard(0),), (Shard(0),)]
    weight = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    found = fxshard.simulate(fxshard.lower(model, (X,), plan), (X,), weights={"weight": weight}).outputs
    torch.testing.assert_close(found, (X @ weight).sin() + 2 * X.numel(), rtol=1e-9, atol=1e-12)
    assert not hasattr(torch.Tensor, "device_mesh")


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "torch's functions in Python": lambda x: F.pad(F.rms_norm(x, (4,)), (1, 1)) + F.pad(F.normalize(x), (1, 1)),
    "Tensor's methods in Python": lambda x: x.split(2, -1)[1] * x.norm(dim=-1, keepdim=True),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)).sum(-1),
    "from the right": lambda x: 2 - 1 / (3 + 2**x) * len(x),
    "iterated": lambda x: torch.stack([row * 2 for row in x]),
    "results in a tuple": lambda x: x.topk(2)[0] + x.max(-1).values[:, None] + x.sort(-1).values[:, :2],
}


@pytest.mark.parametrize("train", [False, True])
def test_distribute_tensor_in_a_forward(mesh: DeviceMesh, train: bool) -> None:
    model = Calls(lambda m, x: distribute_tensor(x @ m.weight, m.mesh, [Shard(1)]).sin().full_tensor(), mesh)
    plan = fxshard.plan(model, (X,), fxshard.Mesh({"tp": 2}), train=train, cache=False)
    assert [spec.outputs[0] for node, spec in plan.specs.items() if node.startswith("placed")] == [(Shard(1),)]
    torch.testing.assert_close(fxshard.simulate(model, (X,), plan).outputs, (X @ model.weight).sin().detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_from_a_dtensor(mesh: DeviceMesh, name: str) -> None:
    """It is one too: its layout can be named."""
    function = COMPUTED[name]
    model, plan = planned(
        lambda m, x: function(DTensor.from_local(x, m.mesh, [Replicate()])).redistribute(m.mesh, [Shard(0)]).full_tensor(), mesh
    )
    assert [spec.outputs[0] for node, spec in plan.specs.items() if node.startswith("placed")] == [(Replicate(),), (Shard(0),)]
    torch.testing.assert_close(fxshard.simulate(model, (X,), plan).outputs, function(X), rtol=1e-9, atol=1e-12)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a partial sum": (lambda m, x: DTensor.from_local(x, m.mesh, [Partial()]).full_tensor(), "declares a partial sum"),
    "a shard of a whole value": (
        lambda m, x: DTensor.from_local(x + 1, m.mesh, [Shard(0)]).full_tensor(),
        "takes a value that is equal on all ranks as this rank",
    ),
    "a shard of what was handed out whole": (
        lambda m, x: DTensor.from_local(DTensor.from_local(x, m.mesh, [Replicate()]).full_tensor(), m.mesh, [Shard(0)]).full_tensor(),
        "takes a value that is equal on all ranks as this rank",
    ),
    "a shard of the local part of a replicated value": (
        lambda m, x: DTensor.from_local(
            DTensor.from_local(x, m.mesh, [Replicate()]).redistribute(placements=[Replicate()]).to_local().sin(), m.mesh, [Shard(0)]
        ).full_tensor(),
        "takes a value that is equal on all ranks as this rank",
    ),
    "a shard as argument": (lambda m, x: DTensor.from_local(x, m.mesh, [Shard(0)]).full_tensor(), r"takes args\[0\] as this rank's shard"),
    "a result in an unknown layout": (lambda m, x: distribute_tensor(x, m.mesh, [Shard(0)]).cumsum(0).to_local(), "does not name"),
    "the local part of a matrix product": (
        lambda m, x: (DTensor.from_local(x, m.mesh, [Replicate()]) @ m.weight).to_local(),
        "does not name",
    ),
    "a dim that is not there": (lambda m, x: distribute_tensor(x, m.mesh, [Shard(2)]).full_tensor(), "dim 2 in S.2. is out of range"),
    "a method of DTensors on a plain tensor": (lambda m, x: x.redistribute(placements=[Shard(0)]), "no attribute 'redistribute'"),
    "another dtype": (
        lambda m, x: (
            DTensor.from_local(x, m.mesh, [Replicate()]).redistribute(placements=[Shard(0)], forward_dtype=torch.half).full_tensor()
        ),
        "redistribute changes a dtype",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_line(mesh: DeviceMesh, case: str) -> None:
    function, what = REFUSED[case]
    with pytest.raises(TraceError) as caught:
        planned(function, mesh)
    assert re.search(what, caught.value.what)  # not in the whole text, which quotes the line above
    assert "test_named_layouts.py:" in str(caught.value)


def test_another_mesh_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(TraceError, match=r"the model redistributes for the mesh tp=2, the plan for dp=2"):
        planned(chain, mesh, {"dp": 2})
