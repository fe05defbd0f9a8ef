"""The simulator: collectives by their definitions, ranks that disagree, replicas that differ, tangents and arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import fxshard
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.errors import OptionError, PlanError, RunError
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.runtime.simulate.shards import gather, scatter
from fxshard.runtime.simulate.simulate import run_lockstep
from tests.moved import Ranks
from tests.reference_shards import assert_is_sharded, coordinates

L = Layout.parse
c10d = torch.ops._c10d_functional
MESH, PAIR = Mesh({"a": 2, "b": 3}), Mesh({"a": 2})


Body = Callable[[LocalGraph, fx.Node], fx.Node]


def run(mesh: Mesh, body: Callable[[tuple[int, ...]], Body], shape: tuple[int, ...] = (6, 2)) -> tuple[dict, dict, list]:
    """(inputs, results, recorded collectives) of the program ``body(coordinate)`` on each rank, with random inputs."""
    inputs = {c: torch.randn(shape, dtype=torch.float64) for c in coordinates(mesh.shape)}
    graphs = {}
    for c in inputs:
        local = LocalGraph(mesh, c)
        local.graph.output((body(c)(local, local.placeholder("x", shape, torch.empty((), dtype=torch.float64))),))
        graphs[c] = local.finish()
    results, recorded = run_lockstep(Ranks(mesh, graphs), {c: [x] for c, x in inputs.items()})  # type: ignore[arg-type]  # only what run_lockstep reads
    return inputs, {c: r[0] for c, r in results.items()}, recorded


def collective(target: object, *args: object) -> Body:
    return lambda local, x: local.emit(c10d.wait_tensor.default, local.emit(target, x, *args))


@pytest.mark.parametrize("axis", ["a", "b"])
def test_collectives_by_their_definitions(axis: str) -> None:
    """Each group of ranks along the axis communicates alone; pieces are in rank order on dim 0."""
    k = MESH.axis(axis)
    n = MESH.shape[k]
    groups = {c: [(*c[:k], i, *c[k + 1 :]) for i in range(n)] for c in MESH.coordinates()}
    for op, reduce in {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}.items():
        x, out, recorded = run(MESH, lambda c, op=op: collective(c10d.all_reduce.default, op, axis))
        assert [(r.kind, r.axis, r.shape, r.dtype) for r in recorded] == [("all_reduce", axis, (6, 2), "torch.float64")]
        for c, group in groups.items():
            torch.testing.assert_close(out[c], reduce(torch.stack([x[g] for g in group]), 0))
        x, out, _ = run(MESH, lambda c, op=op: collective(c10d.reduce_scatter_tensor.default, op, n, axis))
        for c, group in groups.items():
            torch.testing.assert_close(out[c], reduce(torch.stack([x[g] for g in group]), 0).chunk(n)[c[k]])
    x, out, _ = run(MESH, lambda c: collective(c10d.all_gather_into_tensor.default, n, axis))
    assert all(torch.equal(out[c], torch.cat([x[g] for g in group])) for c, group in groups.items())
    x, out, _ = run(MESH, lambda c: collective(c10d.all_to_all_single.default, [6 // n] * n, [6 // n] * n, axis))
    assert all(torch.equal(out[c], torch.cat([x[g].chunk(n)[c[k]] for g in group])) for c, group in groups.items())


@pytest.mark.parametrize(
    "other",
    [
        collective(c10d.all_reduce.default, "max", "a"),
        collective(c10d.all_reduce.default, "sum", "b"),
        collective(c10d.all_gather_into_tensor.default, 2, "a"),
        lambda local, x: collective(c10d.all_reduce.default, "sum", "a")(local, local.emit(torch.ops.aten.slice.Tensor, x, 0, 0, 3)),
    ],
    ids=["reduction", "axis", "kind", "shape"],
)
def test_ranks_that_issue_different_collectives_are_named(other: Body) -> None:
    mine = collective(c10d.all_reduce.default, "sum", "a")
    said = r"rank 4 issues \(.*\) at node \w+, rank 0 issues \('all_reduce', 'a', 'sum', \(6, 2\).*\) at node all_reduce"
    with pytest.raises(RunError, match=said) as e:
        run(MESH, lambda c: other if c == (1, 1) else mine)
    assert e.value.remedy


def test_a_rank_that_ends_early_is_named() -> None:
    mine = collective(c10d.all_reduce.default, "sum", "a")
    with pytest.raises(RunError, match=r"rank 1 has ended, rank 0 issues .* at node all_reduce"):
        run(PAIR, lambda c: mine if c == (0,) else lambda local, x: x)


class TwoSums(nn.Module):
    """Two all-reduces, from two source lines, with the plan of ``changed``."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x).relu()
        return self.two(y).tanh()


def changed(change: Callable[[fx.Graph, list[fx.Node]], None], where: tuple[int, ...]) -> Ranks:
    """The program of ``TwoSums`` on a 2x2 mesh, with the graph of rank ``where`` changed by ``change(graph, its collectives)``."""
    mesh = Mesh({"a": 2, "b": 2})
    pins = {"one.weight": "RS(1)", "two.weight": "S(1)R", "einsum": "RP", "einsum_1": "PR"}
    plan = fxshard.plan(TwoSums(), (torch.ones(4, 8),), mesh, train=False, pins=pins, input_layouts="RR", output_layouts="RR")
    program = fxshard.lower(TwoSums(), (torch.ones(4, 8),), plan)
    graphs = {c: program.local(c) for c in mesh.coordinates()}
    other = copy.deepcopy(graphs[where])
    found = [n for n in other.graph.nodes if n.target is c10d.all_reduce.default]
    assert [n.args[-1] for n in found] == ["b", "a"]
    change(other.graph, found)
    graphs[where] = other
    return Ranks(mesh, graphs)


def ends(graph: fx.Graph, collectives: list[fx.Node]) -> None:
    (wait,) = collectives[1].users
    wait.replace_all_uses_with(collectives[1].args[0])
    graph.erase_node(wait)
    graph.erase_node(collectives[1])


def on_another_axis(graph: fx.Graph, collectives: list[fx.Node]) -> None:
    collectives[0].args = (*collectives[0].args[:-1], "a")


def in_another_order(graph: fx.Graph, collectives: list[fx.Node]) -> None:
    """Swaps the axes of the two collectives."""
    for node, axis in zip(collectives, ("a", "b"), strict=True):
        node.args = (*node.args[:-1], axis)


def of_another_dtype(graph: fx.Graph, collectives: list[fx.Node]) -> None:
    with graph.inserting_before(collectives[1]):
        half = graph.call_function(torch.ops.aten._to_copy.default, (collectives[1].args[0],), {"dtype": torch.float16})
    collectives[1].args = (half, *collectives[1].args[1:])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (ends, r"rank 3 has ended, rank 0 issues \('all_reduce', 'a', .* \(.*test_simulate.py:\d+: return self.two"),
        (on_another_axis, r"rank 3 issues \('all_reduce', 'a', .*y = self.one.*, rank 0 issues \('all_reduce', 'b', .*y = self.one"),
        (in_another_order, r"rank 3 issues \('all_reduce', 'a', .*, rank 0 issues \('all_reduce', 'b'"),
        (of_another_dtype, r"rank 3 issues .*float16.* return self.two.*, rank 0 issues .*float32(.|\n)*after 1 collectives that agreed"),
    ],
)
def test_collectives_that_would_hang_are_named_with_their_source_line(change: Callable[..., None], said: str) -> None:
    """The error names the node and the user's line, on the rank whose graph differs."""
    ranks = changed(change, (1, 1))
    inputs = {c: [torch.ones(n.meta["val"].shape) for n in g.graph.nodes if n.op == "placeholder"] for c, g in ranks.graphs.items()}
    with pytest.raises(RunError, match=said):
        run_lockstep(ranks, inputs)  # type: ignore[arg-type]  # only what run_lockstep reads


def test_at_most_sixty_four_ranks() -> None:
    model, x = TwoSums().double(), torch.randn(16, 8, dtype=torch.float64)
    mesh = Mesh({"a": 4, "b": 4, "c": 4})
    pins = {"one.weight": "RRS(0)", "two.weight": "RS(0)S(1)", "einsum_1": "RS(1)P"}
    result = fxshard.simulate(model, (x,), fxshard.plan(model, (x,), mesh, pins=pins, input_layouts="S(0)RR"))
    out = model(x)
    out.sum().backward()
    torch.testing.assert_close(result.outputs, out.detach())
    torch.testing.assert_close(result.grads["two.weight"], model.two.weight.grad)
    assert result.ranks["two.weight"][63].shape == (2, 1)
    with pytest.raises(OptionError, match="has 128 ranks, the simulator runs up to 64"):
        fxshard.simulate(model, (x,), mesh=Mesh({"a": 4, "b": 32}))


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown reduction 'ncll'; did you mean 'nccl'"):
        fxshard.simulate(net()[0], (net()[1],), mesh=PAIR, reduction="ncll")


def test_all_to_all_with_uneven_splits() -> None:
    """Rank 0 keeps one row and sends two; the splits of both ranks must agree."""
    splits = {(0,): ([1, 3], [1, 2]), (1,): ([2, 0], [3, 0])}
    shapes = {(0,): (3, 2), (1,): (3, 2)}
    x, out, _ = run(PAIR, lambda c: collective(c10d.all_to_all_single.default, *splits[c], "a"), shapes[0,])
    assert torch.equal(out[0,], torch.cat([x[0,][:1], x[1,]]))
    assert torch.equal(out[1,], x[0,][1:])
    splits[1,] = ([1, 0], [3, 0])
    with pytest.raises(RunError, match="rank 0 sends 2 rows to rank 1, which takes 1, at node all_to_all"):
        run(PAIR, lambda c: collective(c10d.all_to_all_single.default, *splits[c], "a"), shapes[0,])


@pytest.mark.parametrize("layout", ["S(0)R", "RS(1)", "S(0)S(0)", "PR", "RP", "PP", "S(1)P", "P(product)R", "RP(max)", "P(avg)P(avg)"])
def test_scatter_and_gather(layout: str) -> None:
    value = torch.randn(7, 5, dtype=torch.float64)
    shards = {c: scatter(value, L(layout), MESH, c) for c in MESH.coordinates()}
    assert_is_sharded(value, shards, L(layout), MESH.shape)
    torch.testing.assert_close(gather(shards, L(layout), (7, 5), MESH), value)


@pytest.mark.parametrize("layout", ["R", "S(0)"])
def test_replicas_that_differ_are_an_error(layout: str) -> None:
    mesh = Mesh({"a": 2, "b": 2})
    shards = {c: torch.ones(4) for c in mesh.coordinates()}
    shards[1, 1] = torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-4])
    with pytest.raises(RunError, match="replicas differ in a result with layout"):
        gather(shards, L(layout + "R"), (4,) if layout == "R" else (8,), mesh)
    shards[1, 1] = shards[1, 0] = torch.full((4,), torch.nan)
    assert layout == "R" or gather(shards, L("S(0)R"), (8,), mesh)[4:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_replicas_of_float8_are_compared_bit_for_bit(dtype: torch.dtype) -> None:
    numbers = torch.tensor([1.0, -2.5, 0.0, torch.nan]).to(dtype)
    shards = {(0,): numbers, (1,): numbers.clone()}
    assert torch.equal(gather(shards, L("R"), (4,), PAIR).view(torch.uint8), numbers.view(torch.uint8))
    shards[1,] = torch.tensor([1.25, -2.5, 0.0, torch.nan]).to(dtype)
    with pytest.raises(RunError, match="replicas differ"):
        gather(shards, L("R"), (4,), PAIR)


class Net(nn.Module):
    """Keyword arguments, two differentiable outputs in a dict and one that is not; the second layer is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, twice: bool = False) -> dict[str, object]:
        y = self.two(torch.tanh(self.one(x))) * scale
        return {"y": y * 2 if twice else y, "top": y.argmax(-1), "loss": y.sum()}


def net() -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(6, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)


@pytest.mark.parametrize("twice", [False, True])
def test_a_model_without_a_plan_with_keyword_arguments(twice: bool) -> None:
    model, x, scale = net()
    kwargs = {"scale": scale, "twice": twice}
    result, expected = fxshard.simulate(model, (x,), kwargs=kwargs, mesh=PAIR), model(x, **kwargs)
    assert list(result.outputs) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(result.outputs[name], value.detach())
    (expected["y"].sum() + expected["loss"]).backward()
    torch.testing.assert_close(result.grads["one.weight"], model.one.weight.grad)
    assert result.grads["two.weight"] is result.grads["one.weight"]
    assert set(result.grads) == {"one.weight", "two.weight"}


def test_tangents_weigh_the_outputs() -> None:
    """Tangents have the structure of the outputs; the entry of an output without gradient is ignored."""
    model, x, scale = net()
    plan = fxshard.plan(model, (x,), Mesh({"a": 2, "b": 2}), {"scale": scale}, pins={"one.weight": "S(0)S(1)"})
    tangents = {"y": torch.randn(6, 4, dtype=torch.float64), "top": None, "loss": torch.tensor(3.0, dtype=torch.float64)}
    result = fxshard.simulate(model, (x,), plan, {"scale": scale}, tangents)
    out = model(x, scale=scale)
    torch.autograd.backward([out["y"], out["loss"]], [tangents["y"], tangents["loss"]])
    torch.testing.assert_close(result.grads["one.weight"], model.one.weight.grad)


@pytest.mark.parametrize(
    ("tangents", "said"),
    [
        ({"y": None, "top": None, "loss": torch.tensor(1.0)}, r"tangents has no tensor for output 0"),
        ({"y": torch.ones(3, 4), "top": None, "loss": torch.tensor(1.0)}, r"tangents\[0\] is \(3, 4\) .*, the program takes \(6, 4\)"),
        ([], "tangents has no tensor"),
    ],
)
def test_bad_tangents(tangents: object, said: str) -> None:
    model, x, scale = net()
    with pytest.raises(RunError, match=said) as error:
        fxshard.simulate(model, (x,), kwargs={"scale": scale}, tangents=tangents, mesh=PAIR)
    assert error.value.remedy


def test_arguments_that_the_program_was_not_traced_with() -> None:
    model, x, scale = net()
    plan = fxshard.plan(model, (x,), PAIR, {"scale": scale}, train=False)
    program = fxshard.lower(model, (x,), plan, {"scale": scale})
    with pytest.raises(RunError, match=r"no value for parameter 'one.weight'(.|\n)*the model, or weights="):
        fxshard.simulate(program, (x,), kwargs={"scale": scale})
    weights = {"one.weight": model.one.weight}
    with pytest.raises(RunError, match=r"the argument kwargs\['scale'\] is missing"):
        fxshard.simulate(program, (x,), weights=weights)
    with pytest.raises(RunError, match=r"args\[0\] is \(5, 4\) torch.float64, the program takes \(6, 4\)"):
        fxshard.simulate(program, (x[:5],), kwargs={"scale": scale}, weights=weights)
    for kwargs, said in (
        ({"scale": scale, "twice": True}, r"the argument kwargs\['twice'\] is unexpected"),
        ({"scale": 2.0}, r"kwargs\['scale'\] is 2.0, the program was traced with a tensor"),
        ({"scale": [scale]}, r"kwargs\['scale'\] is a list, the program was traced with a single value"),
    ):
        with pytest.raises(RunError, match=said):
            fxshard.simulate(program, (x,), kwargs=kwargs, weights=weights)
    with pytest.raises(OptionError, match="has its plan already"):
        fxshard.simulate(program, (x,), plan, kwargs={"scale": scale}, weights=weights)
    with pytest.raises(PlanError, match="the plan is for mesh a=2, not a=4"):
        fxshard.simulate(program, (x,), kwargs={"scale": scale}, weights=weights, mesh=Mesh({"a": 4}))
    result = fxshard.simulate(program, (x,), kwargs={"scale": scale}, weights=weights)
    torch.testing.assert_close(result.outputs["y"], model(x, scale=scale)["y"].detach())
    assert result.grads == {}


def test_tensors_without_values_are_refused() -> None:
    model, x, scale = net()
    plan = fxshard.plan(model, (x,), PAIR, {"scale": scale}, train=False)
    program = fxshard.lower(model, (x,), plan, {"scale": scale})
    with torch.device("meta"):
        empty = Net().double()
    with pytest.raises(RunError, match=r"parameter one.weight has no memory: it is on meta(.|\n)*to_empty"):
        fxshard.simulate(empty, (x,), plan, {"scale": scale})
    with pytest.raises(RunError, match=r"input args\[0\] has no memory: it is on meta(.|\n)*holds values"):
        fxshard.simulate(model, (x.to("meta"),), plan, {"scale": scale})
    fake = FakeTensorMode().from_tensor(x)
    with pytest.raises(RunError, match=r"input args\[0\] has no memory: it is a fake tensor"):
        fxshard.simulate(program, (fake,), kwargs={"scale": scale}, weights={"one.weight": model.one.weight})


def test_the_remedy_fits_an_exported_program() -> None:
    model, x, scale = net()
    program = fxshard.export(model, (x,), PAIR, example_kwargs={"scale": scale})
    for wrong in ((x[:5],), (x.float(),), (x, x)):
        with pytest.raises(RunError) as error:
            fxshard.simulate(program, wrong, kwargs={"scale": scale})
        assert error.value.remedy.startswith("give ") and "of the example, or plan (export) again for these" in error.value.remedy


@pytest.mark.parametrize("value", [True, 3, 0.5, float("inf"), "text", None])
def test_constants_are_part_of_a_program_and_of_its_file(value: object, tmp_path: Path) -> None:
    """Another value is an error, even one that is equal, as 1 and True are."""

    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor, how: object, *, other: int) -> torch.Tensor:
            return x * other if how else x

    x = torch.ones(4, 2)
    fxshard.export(Chosen(), (x, value), PAIR, example_kwargs={"other": 2}).save(tmp_path / "m.pt2")
    program = fxshard.load(tmp_path / "m.pt2")
    assert dict(program.constants) == {"args[1]": value, "kwargs['other']": 2}
    torch.testing.assert_close(fxshard.simulate(program, (x, value), kwargs={"other": 2}).outputs, x * 2 if value else x)
    for wrong in (False, 1, 1.0, "other", x):
        with pytest.raises(RunError, match=r"args\[1\] is .*, the program was traced with") as error:
            fxshard.simulate(program, (x, wrong), kwargs={"other": 2})
        assert error.value.remedy


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(OptionError, match="takes a plan or a mesh"):
        fxshard.simulate(net()[0], (net()[1],))
    with pytest.raises(OptionError, match="cannot simulate a str"):
        fxshard.simulate("model", ())  # type: ignore[arg-type]  # the wrong type is what is tested
