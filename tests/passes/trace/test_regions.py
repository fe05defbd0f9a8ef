"""local_map regions have the user's placements, run on shards and have gradients; invalid ones are refused with their line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.errors import TraceError
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.trace.trace import trace
from fxshard.shapes import DynamicDim
from tests.passes.tracing import SQUARE, THREE, TWO, Function, check_eager, real

CUT, WHOLE, SUM = [Shard(0)], [Replicate()], [Partial()]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A DeviceMesh of two axes, which local_map requires. Planning itself needs no process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


class Region(nn.Module):
    """A region between other operators. Its weight is an argument."""

    def __init__(self, region: Callable[..., Any], outside: Callable[[Tensor], Any] = torch.sin) -> None:
        super().__init__()
        self.weight = nn.Parameter(real(6, 4).detach())
        self.region, self.outside = region, outside

    def forward(self, x: Tensor) -> Any:
        return self.outside(self.region(x * 2, self.weight))


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight)


def rows(mesh: DeviceMesh) -> Any:
    placements = {"out_placements": CUT, "in_placements": (CUT, WHOLE), "in_grad_placements": (CUT, SUM)}
    return local_map(product, device_mesh=mesh["a"], **placements)


def test_a_region_equals_its_function_on_one_device(mesh: DeviceMesh) -> None:
    """The region is on one of two axes; random plans shard what is outside on the other. Gradients of input and weight are compared too."""
    graph, _ = check_eager(Region(rows(mesh)), real(8, 6), plans=6)
    specs = annotate(graph, SQUARE).specs
    assert [str(s) for s in specs["to_local"]] == ["S(0)R -> RR"] and [str(s) for s in specs["from_local"]] == ["RR -> S(0)R"]
    assert {len(specs[n]) for n in ("to_local_1", "einsum", "relu")} == {1} and len(specs["mul"]) > 1 and len(specs["sin"]) > 1


@pytest.mark.parametrize("summed", [False, True])
def test_a_region_has_one_size(mesh: DeviceMesh, summed: bool) -> None:
    """Dynamo's messages differ by whether the dim that changes is sharded."""
    over = local_map(product, SUM, ([Shard(1)], CUT), device_mesh=mesh["a"], redistribute_inputs=True)
    with pytest.raises(
        TraceError, match=r"^torch captures a local_map region for one size only(.|\n)*leave the dims of its arguments static"
    ):
        trace(Region(over if summed else rows(mesh)), (real(8, 6),), dynamic=(DynamicDim("n", (("args[0]", 0),), 8),))


def test_sums_and_two_axes(mesh: DeviceMesh) -> None:
    """x is sharded on both axes, and sums over its second dim stay pending. One argument is no tensor; there are two results."""

    def body(x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return (x @ weight) * scale, x.sum(1)

    ins = ([Shard(0), Shard(-1)], [Replicate(), Shard(0)], None)
    grads = ([Shard(0), Shard(1)], [Partial(), Shard(0)], None)
    placed = local_map(body, ([Shard(0), Partial()], [Shard(0), Partial()]), ins, grads, mesh)
    model = Region(lambda x, w: placed(x, w, 0.5), outside=lambda pair: pair[0].sin() + pair[1][:, None])
    check_eager(model, real(4, 6), plans=4)


def test_the_function_sees_shards(mesh: DeviceMesh) -> None:
    """Each rank's mean is over its own rows, not over all rows."""

    def centred(x: Tensor) -> Tensor:
        return (x - x.mean(0)) * x.shape[0]

    model, x = Function(lambda self, x: local_map(centred, CUT, (CUT,), device_mesh=mesh["a"])(x)), real(8, 3)
    result = fxshard.simulate(model, (x,), mesh=TWO)
    want = torch.cat([centred(part) for part in x.chunk(2)])
    torch.testing.assert_close(result.outputs, want.detach())
    torch.testing.assert_close(result.grads["args[0]"], torch.autograd.grad(want.sum(), x)[0])


def test_gradients_have_dtensors_default_placements(mesh: DeviceMesh) -> None:
    """They are those of the value, as in DTensor's to_local: the weight's gradient is taken to be replicated."""
    graph = trace(Region(local_map(product, CUT, (CUT, WHOLE), device_mesh=mesh["a"])), (real(8, 6),))
    ends = {str(s) for n, specs in annotate(graph, TWO).specs.items() if n.startswith("from_local") for s in specs}
    assert ends == {"R -> S(0)", "R -> R"}


CLOSED = real(6, 4)


def closes_over(mesh: DeviceMesh) -> Any:
    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(CLOSED.detach())

        def forward(self, x: Tensor) -> Tensor:
            return local_map(lambda y: y @ self.weight, CUT, (CUT,), device_mesh=mesh["a"])(x)  # culprit

    return Closing()


def region(function: Callable[..., Any] = product, *, outs: Any = CUT, ins: Any = (CUT, WHOLE), axis: str = "a") -> Callable[[Any], Any]:
    return lambda mesh: Region(local_map(function, outs, ins, device_mesh=mesh[axis]))


REFUSED: dict[str, Callable[[DeviceMesh], Any]] = {
    "has no in_placements": region(ins=None),
    "has no device_mesh": lambda mesh: Region(local_map(product, CUT, (CUT, WHOLE))),
    "in_placements length 1 does not match the number of input args 2": region(ins=(CUT,)),
    "argument 1 of a local_map region is a tensor without placements": region(ins=(CUT, None)),
    "has 7 elements in dim 0, which are not cut evenly by a=2": region(),
    "is for the mesh b=2, the plan for": region(axis="b"),
    "leaves it without a placement": closes_over,
    "draws random numbers in a local_map region": region(lambda x, w: torch.nn.functional.dropout(x @ w)),
    "communicates in a local_map region": lambda mesh: region(lambda x, w: all_reduce(x @ w, "sum", mesh["a"]), outs=WHOLE)(mesh),
}


@pytest.mark.parametrize("said", REFUSED)
def test_invalid_regions_are_refused(said: str, mesh: DeviceMesh) -> None:
    x = real(7 if said.startswith("has 7") else 8, 6)
    with pytest.raises(TraceError) as error:
        fxshard.plan(REFUSED[said](mesh), (x,), TWO)
    assert said in error.value.what  # not in the text of the error, which quotes the line above that says the same
    assert error.value.remedy and error.value.where and __file__ in error.value.where


@pytest.mark.skipif("spmd_types" not in inspect.signature(local_map).parameters, reason="torch 2.14 has this option")
def test_a_check_of_types_is_refused(mesh: DeviceMesh) -> None:
    checked: Any = {"spmd_types": True}
    model = Region(local_map(product, CUT, (CUT, WHOLE), device_mesh=mesh["a"], **checked))
    with pytest.raises(TraceError, match="asks for spmd_types") as error:
        fxshard.plan(model, (real(8, 6),), TWO)
    assert error.value.remedy and error.value.where and __file__ in error.value.where


def test_a_mesh_of_fxshard_is_refused_with_a_remedy(mesh: DeviceMesh) -> None:
    with pytest.raises(TraceError, match="frozen dataclass") as error:
        fxshard.plan(Region(local_map(product, CUT, (CUT, WHOLE), device_mesh=TWO)), (real(8, 6),), TWO)
    assert error.value.where and __file__ in error.value.where
    assert "give torch's DeviceMesh in place of a fxshard.Mesh" in (error.value.remedy or "")


def test_a_plan_for_a_mesh_of_another_size_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(TraceError, match="is for the mesh a=2, the plan for"):
        fxshard.plan(Region(rows(mesh)), (real(8, 6),), THREE)
