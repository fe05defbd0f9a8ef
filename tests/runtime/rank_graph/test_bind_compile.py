"""bind, kernels, partition and compile in one process, with torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from fxshard.errors import OptionError, PlanError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.ops import contraction
from fxshard.passes.after_lowering.forward_backward import by_order, forward_collectives, forward_results
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram, is_collective
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.rank_graph.bind import axis_of_group, bind, bind_graph
from fxshard.runtime.rank_graph.kernels import device_graph
from fxshard.runtime.rank_graph.partition import partition
from fxshard.testing.random_plan import random_graph_plan
from tests.models import zoo

CPU = torch.device("cpu")


@pytest.fixture
def four_ranks() -> Iterator[DeviceMesh]:
    """This process is rank 3 of 2 x 2; collectives do nothing."""
    dist.init_process_group("fake", rank=3, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@cache
def graph_of(name: str) -> PlanningGraph:
    """The graph of a model of the zoo, or of a Llama with one layer and a batch of 5."""
    if name == "one layer":
        return trace(zoo.Llama.small(layers=1), tuple(torch.zeros(5, 8, dtype=torch.int64) for _ in range(2)))
    return trace(*zoo.make(name))


def random_program(name: str, mesh: str, seed: int, frugal: bool = False) -> ShardedProgram:
    graph = graph_of(name)
    return lower(graph, random_graph_plan(annotate(graph, parse_mesh(mesh)), seed, frugal=frugal))


def linear_program(pins: dict[str, str], mesh: Mesh, train: bool = True) -> ShardedProgram:
    graph = trace(nn.Linear(6, 4), (torch.randn(5, 6),), train=train)
    return lower(graph, plan_graph(graph, mesh, Request(pins=pins)))


def collectives(module: fx.GraphModule) -> list[str]:
    return [f"{n.target} {n.args[1:]} {tuple(n.args[0].meta['val'].shape)}" for n in module.graph.nodes if is_collective(n)]


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("aby,zy->abz", (2, 3, 4), (5, 4)),
        ("abz,aby->zy", (2, 3, 5), (2, 3, 4)),
        ("abxy,abyz->abxz", (2, 3, 4, 5), (2, 3, 5, 6)),
        ("xy,ayz->axz", (4, 5), (3, 5, 6)),
        ("zy,aby->bza", (5, 4), (2, 3, 4)),
        ("aby,bz->abyz", (2, 3, 4), (3, 5)),
        ("by,by->b", (2, 3), (2, 3)),
        ("y,zy->z", (4,), (5, 4)),
        ("y,y->", (4,), (4,)),
        ("z,y->zy", (3,), (4,)),
        ("aby,zy->abz", (2, 0, 4), (5, 4)),
        ("aby,zy->abz", (2, 3, 0), (5, 0)),
    ],
)
def test_contraction_is_einsum(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = torch.randn(a, dtype=torch.float64), torch.randn(b, dtype=torch.float64)
    have, want = contraction.einsum_kernel(x, y, equation), torch.einsum(equation, x, y)
    assert have.is_contiguous()
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def test_device_graph_has_the_devices_operators() -> None:
    program = random_program("one layer", "a=2", 1)
    for module in program.modules.values():
        traced = device_graph(bind_graph(module, {"a": "group"})[0], CPU)
        neutral = {str(n.target) for n in traced.graph.nodes if getattr(n.target, "namespace", "") == "fxshard"}
        assert not neutral
        assert any("flash_attention_for_cpu" in str(n.target) for n in traced.graph.nodes)


def test_axis_index_becomes_an_input_and_axes_become_groups(four_ranks: DeviceMesh) -> None:
    program = linear_program({"weight": "RS(0)", "args[0]": "RR"}, parse_mesh("dp=2,tp=2"))
    program = program if any(is_collective(n) for n in program.local((0, 0)).graph.nodes) else random_program("mlp_batch5", "dp=2,tp=2", 0)
    before = str(program.local((1, 1)).graph)
    bound = bind(program, four_ranks)
    assert str(program.local((1, 1)).graph) == before, "binding must not change the program"
    assert bound.coordinate == (1, 1) and bound.device == CPU
    names = [n.name for n in bound.module.graph.nodes if n.op == "placeholder"]
    assert names[len(program.inputs) :] == [f"axis_index_{axis}" for axis in bound.axes]
    assert [int(v) for v in bound.axis_values] == [1] * len(bound.axes)
    groups = {n.args[-1] for n in bound.module.graph.nodes if is_collective(n)}
    assert groups and groups <= {name for _, name in bound.groups} and {axis_of_group(g) for g in groups} <= {"dp", "tp"}
    for axis, name in bound.groups:
        assert torch.distributed.distributed_c10d._resolve_process_group(name) is four_ranks.get_group(axis)


def test_another_mesh_is_refused(four_ranks: DeviceMesh) -> None:
    for mesh in ("dp=4", "tp=2,dp=2", "dp=2,tp=4"):
        with pytest.raises(PlanError, match=f"{mesh}, the device mesh is dp=2,tp=2"):
            bind(linear_program({}, parse_mesh(mesh)), four_ranks)


ALWAYS = [("mlp_batch5", "a=4", 0), ("mlp_batch5", "a=4", 2), ("one layer", "a=4", 1), ("cnn", "a=2,b=2", 1)]
FURTHER = [("mlp_batch5", "a=4", 1), ("cnn", "a=2,b=2", 0), ("llama_batch5", "a=4", 0), ("llama_batch5", "a=4", 2), ("cnn", "a=2,b=2", 2)]


@pytest.mark.parametrize(("name", "mesh", "seed"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)])
def test_all_size_classes_issue_the_same_collectives(name: str, mesh: str, seed: int) -> None:
    """Forward and backward have the same collectives in each size class, empty shards included. Together they are the program's."""
    program = random_program(name, mesh, seed, frugal=seed > 0)
    tangents = [i for i, end in enumerate(program.inputs) if end.kind == "tangent"]
    early = forward_collectives(program)
    found = []
    for module in program.modules.values():
        traced = device_graph(bind_graph(module, {a: a for a in program.mesh.axis_names})[0], CPU)
        parts = partition(traced, forward_results(program), tangents, early, by_order(program))
        found.append((collectives(parts.forward), collectives(parts.backward)))
    assert all(f == found[0] for f in found)
    assert len(found[0][0]) == sum(early) and len(found[0][0]) + len(found[0][1]) == len(program.collectives)


def test_ranks_of_one_size_class_share_the_artefact(four_ranks: DeviceMesh) -> None:
    program = linear_program({"weight": "RS(0)"}, parse_mesh("dp=2,tp=2"))
    first, second = (compile_program(bind(program, four_ranks), "eager") for _ in range(2))
    assert first.artefact is second.artefact
    with pytest.raises(OptionError, match="unknown compiler 'jit'"):
        compile_program(bind(program, four_ranks), "jit")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_program_is_differentiable_on_local_tensors(backend: str) -> None:
    """On a mesh of one the local program computes the model."""
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        model, x = nn.Linear(6, 4), torch.randn(5, 6, requires_grad=True)
        graph = trace(model, (x,))
        program = lower(graph, plan_graph(graph, parse_mesh("dp=1"), Request()))
        compiled = compile_program(bind(program, mesh), backend)
        (out,) = compiled([model.weight, model.bias, x])
        grads = torch.autograd.grad(out.square().sum(), [model.weight, model.bias, x], retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), [model.weight])
        want = torch.autograd.grad(model(x).square().sum(), [model.weight, model.bias, x])
        for have, reference in zip((*grads, *again), (*want, want[0]), strict=True):
            torch.testing.assert_close(have, reference)
        with torch.no_grad():
            (out,) = compiled([model.weight, model.bias, x])
        assert not out.requires_grad and not isinstance(out, DTensor)
    finally:
        dist.destroy_process_group()


def test_inductor_caches_what_it_compiles() -> None:
    """On disk, so that a restart does not compile again. Inductor bypasses its cache for graphs with an unknown tracing mode."""
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        graph = trace(nn.Linear(6, 4), (torch.randn(5, 6),))
        counters["inductor"].clear()
        compile_program(bind(lower(graph, plan_graph(graph, parse_mesh("dp=1"), Request())), mesh), "inductor")
        found = counters["inductor"]
        assert found["fxgraph_cache_hit"] + found["fxgraph_cache_miss"] == 2 and not found["fxgraph_cache_bypass"]
    finally:
        dist.destroy_process_group()


class Table(torch.nn.Module):
    """Has no inputs: what a rank computes depends on its coordinate alone."""

    def forward(self) -> torch.Tensor:
        return torch.arange(8).sin()


def test_a_program_without_inputs_knows_its_rank() -> None:
    mesh = Mesh({"a": 4})
    plan = fxshard.plan(Table(), (), mesh, train=False, pins={"arange": "S(0)", "sin": "S(0)"}, output_layouts="R")
    assert plan.layout_of("sin") == fxshard.Layout.parse("S(0)")
    program = fxshard.lower(Table(), (), plan)
    torch.testing.assert_close(fxshard.simulate(program, ()).outputs, torch.arange(8).sin())
    module, axes = bind_graph(program.local((0,)), {"a": "g"})
    assert axes == ("a",) and [n.op for n in module.graph.nodes][:2] == ["placeholder", "call_function"]
