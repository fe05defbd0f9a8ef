"""The torch.compile backend in one process, on a mesh of one rank: names, options, outputs, plans, errors."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fxshard
import fxshard.runtime.backend.backend as backend
from fxshard.errors import ConstraintError, FileError, OptionError, PlanError, RunError, TraceError
from fxshard.layout.layouts import Layout
from fxshard.runtime.backend.backend import GraphPrograms
from fxshard.runtime.backend.dynamo_graph import trace_graph, user_name
from fxshard.runtime.backend.graph_outputs import Output
from fxshard.runtime.backend.graph_runner import graph_runner
from fxshard.runtime.calls.inputs import reader
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.rank_graph.bind import BoundProgram

ONE = fxshard.Mesh({"dp": 1})


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def sharded(model: Any, dynamic: bool | None = None, **others: Any) -> Any:
    return torch.compile(model, backend="fxshard", dynamic=dynamic, options={"mesh": ONE, "compiler": "eager", **others})


def test_the_backend_is_found_by_name() -> None:
    assert "fxshard" in torch._dynamo.list_backends()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['up']._parameters['weight']", "up.weight"),
        ("L['self']._modules['layers']._modules['0']._buffers['mean']", "layers.0.mean"),
        ("L['self'].table", "table"),
        ("L['model']._parameters['w']", "w"),
        ("L['x']", "x"),
        ("L['self']", "self"),
        ("L['batch']['x']", "batch['x']"),
        ("G['state'].x", "state.x"),
        ("___elsewhere", "___elsewhere"),
    ],
)
def test_dynamo_sources_become_names_of_the_user(source: str, name: str) -> None:
    assert user_name(source) == name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mesh": ONE, "memory_limits": 3}, "did you mean 'memory_limit'"),
        ({}, "has no mesh: no option 'mesh', no DTensor"),
        ({"mesh": fxshard.Mesh({"dp": 2})}, "init_device_mesh"),
        ({"mesh": 2}, "is an int, not a DeviceMesh"),
        ({"mesh": ONE, "compiler": "inducter"}, "did you mean 'inductor'"),
        ({"mesh": ONE, "objective": "speed"}, "use one of time, communication"),
        ({"mesh": ONE, "timeout": "long"}, "'timeout' is 'long'"),
        ({"mesh": ONE, "pins": [("a", "R")]}, "pins={"),
        ({"mesh": ONE, "plan": 3}, "'plan' is an int"),
        ({"mesh": ONE, "hardware": "h10"}, "did you mean 'h100'"),
    ],
)
def test_bad_options_are_refused_with_a_remedy_and_not_wrapped(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        torch.compile(nn.Linear(2, 2), backend="fxshard", options=options)(torch.ones(1, 2))
    assert said in str(caught.value) and caught.value.remedy


def test_a_plan_for_another_mesh_is_refused() -> None:
    plan = fxshard.plan(nn.Linear(2, 2), (torch.ones(1, 2),), fxshard.Mesh({"dp": 2}))
    with pytest.raises(PlanError, match="dp=2"):
        sharded(nn.Linear(2, 2), plan=plan)(torch.ones(1, 2))


def test_inductor_and_eager_train_like_one_device() -> None:
    for compiler in ("inductor", "eager"):
        model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
        reference = copy.deepcopy(model)
        sharded(model, compiler=compiler)(x).pow(2).sum().backward()
        reference(x).pow(2).sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert not isinstance(p.grad, torch.distributed.tensor.DTensor)
            torch.testing.assert_close(p.grad, q.grad)


def views(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y.view(-1), x.t(), y[0]


def test_outputs_that_share_memory_have_gradients_of_their_own() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    for outputs in (sharded(views)(x), views(z)):
        sum((k + 1) * out.pow(2).sum() for k, out in enumerate(outputs)).backward()
    torch.testing.assert_close(x.grad, z.grad)


def test_outputs_with_other_strides_go_back_into_views() -> None:
    linear, x = nn.Linear(4, 8), torch.randn(2, 3, 4, requires_grad=True)
    heads = lambda x: linear(x).view(2, 3, 2, 4).transpose(1, 2)  # noqa: E731
    out, want = sharded(heads)(x), heads(x)
    torch.testing.assert_close(out, want)
    have, known = (torch.autograd.grad(value.pow(2).sum(), x)[0] for value in (out, want))
    torch.testing.assert_close(have, known)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        self.count += 1
        total += x.sum(0)
        return total


def test_tensors_changed_in_place_keep_their_identity() -> None:
    model, total = Counter(), torch.zeros(3)
    count, compiled = model.count, sharded(model)
    for _ in range(2):
        assert compiled(torch.ones(2, 3), total) is total
    assert model.count is count and float(count) == 2 and total.tolist() == [4.0] * 3


def test_an_activation_changed_in_place_across_a_break_is_refused() -> None:
    with pytest.raises(TraceError, match="x is changed in place and needs a gradient"):
        sharded(lambda x: x.mul_(2).sin())(torch.ones(3, requires_grad=True) * 1)


def scaled(x: Tensor, factor: float, times: int) -> tuple[Tensor, int]:
    return x * factor * times, x.shape[0] * times


class Configured(nn.Module):
    """Reads numbers from an object: Dynamo makes them graph inputs, as it does the argument that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=4, eps=1e-5)

    def forward(self, x: Tensor, times: int) -> Tensor:
        return x * times + self.config.eps + x.shape[0] * self.config.width


def test_the_log_lists_only_numbers_that_change(caplog: pytest.LogCaptureFixture) -> None:
    model = Configured()
    compiled, x = sharded(model, dynamic=True), torch.ones(5)
    with caplog.at_level(logging.INFO, "fxshard"):
        for times in (2, 3, 4):
            torch.testing.assert_close(compiled(x, times), model(x, times))
    said = [r.getMessage() for r in caplog.records if r.name == "fxshard" and "planning again" in r.getMessage()]
    assert said == [f"planning again for inference: x (5,), times={n}, and any other sizes of dim 0 of x" for n in (3, 4)]


def test_changed_numbers_are_planned_again_and_changed_sizes_are_not(caplog: pytest.LogCaptureFixture) -> None:
    compiled = sharded(scaled)
    calls = [(3, 2.0, 1), (4, 2.0, 1), (4, 3.5, 1), (5, 3.5, 2), (5, 0.5, 3), *((n, 1.5, 2) for n in range(6, 16))]
    with caplog.at_level(logging.INFO, "fxshard"):
        for rows, factor, times in calls:
            out, size = compiled(torch.ones(rows), factor, times)
            assert size == rows * times and out.tolist() == [factor * times] * rows
        assert "planning again for inference: x (5,), factor=0.5, times=3, and any other sizes of dim 0 of x" in caplog.text
        assert "x (7,)" not in caplog.text and "each time for other sizes" not in caplog.text
        for times in range(4, 12):
            assert compiled(torch.ones(times), 1.5, times)[0].tolist() == [1.5 * times] * times
    assert "was planned 8 times, each time for other sizes or numbers; these change: x, factor, times" in caplog.text


def test_dropout_follows_the_seed() -> None:
    compiled, x = sharded(nn.Dropout(0.5)), torch.ones(64)
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        masks.append(compiled(x).tolist())
    assert masks[0] == masks[2] != masks[1]


def test_autocast_around_the_call_is_kept() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.randn(2, 4)
    compiled = sharded(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have, want = compiled(x), model(x)
    assert have.dtype == want.dtype
    torch.testing.assert_close(have, want, rtol=1e-2, atol=1e-2)
    assert compiled(x).dtype == torch.float32


def test_a_plan_of_fxshard_plan_fits_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(3, 4)
    fxshard.plan(model, (x,), ONE).save(tmp_path / "plan.json")
    torch.testing.assert_close(sharded(copy.deepcopy(model), plan=tmp_path / "plan.json")(x), model(x))
    with pytest.raises(PlanError, match="another graph"):
        sharded(nn.Sequential(nn.Linear(4, 8)), plan=str(tmp_path / "plan.json"))(x)


def test_a_dump_to_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make the folder"):
        sharded(nn.Linear(4, 2), dump=tmp_path / "file")(torch.ones(3, 4))


def test_dump_has_a_folder_for_each_graph(tmp_path: Path) -> None:
    compiled = sharded(nn.Linear(4, 2), dump=tmp_path, dynamic=False)
    for rows in (3, 5):
        compiled(torch.ones(rows, 4))
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert {"traced.txt", "06_lower.txt", "14_compile.txt"} <= {file.name for file in folder.iterdir()}


def test_weights_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with pytest.raises(RunError, match="weight has no memory"):
        sharded(model)(torch.empty(3, 4, device="meta"))


def test_planning_replaces_the_devices_in_a_graph_by_the_cpu() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.cuda(non_blocking=True).to("cuda:1").to(torch.device("cuda", 0)) + 1)
    planned = trace_graph(graph, [torch.ones(2)], ["x"], ["input"])
    assert {n.meta["val"].device.type for n in planned.nodes if n.op != "output"} == {"cpu"}


def test_constraints_on_outputs_of_modules() -> None:
    """Names of modules work in Dynamo's graph; an unknown name is an error, and a layout on the axis of one rank says nothing."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)
    constraints = [
        fxshard.Pin("1", "R"),
        fxshard.Equal("0", "2"),
        fxshard.Forbid("0", "S(1)"),
        fxshard.Pin("0.weight", "S(0)"),
        fxshard.Communication("dp", at_most=0),
    ]
    torch.testing.assert_close(sharded(model, constraints=constraints)(x), model(x))
    for bad, said in (
        (fxshard.Pin("3", "R"), "'3' matches no parameter, buffer, input, output, module or node"),
        (fxshard.Equal("0", "4"), "'4' matches no"),
    ):
        with pytest.raises(ConstraintError, match=said):
            sharded(model, constraints=[bad])(x)
    with pytest.raises(OptionError, match="constraints are given as a Pin, not as a list"):
        sharded(model, constraints=constraints[0])(x)


def programs_of(function: Any, *example: Tensor, **others: Any) -> GraphPrograms:
    """The callable that the backend gives Dynamo for ``function``, after one call on ``example``. It has no guards of Dynamo."""
    made: list[Any] = []

    def noted(module: Any, inputs: Any) -> Any:
        made.append(backend.fxshard(module, inputs, options={"mesh": ONE, **others}))
        return made[-1]

    torch.compile(function, backend=noted)(*example)
    assert len(made) == 1 and len(made[0].runners) == 1
    return made[0]


def runner_of(programs: GraphPrograms) -> Runner:
    return next(iter(programs.runners.values()))


def called(programs: GraphPrograms, **values: Tensor) -> Tensor:
    """Calls ``programs`` with ``values`` in Dynamo's order of inputs."""
    return programs(*[values[name] for name in programs.graph.names])[0]


def mixed(x: Tensor, y: Tensor) -> Tensor:
    return 2 * x - y


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_inputs_that_are_passed_through_may_have_any_strides(compiler: str) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    programs = programs_of(mixed, x, y, compiler=compiler)
    assert runner_of(programs).passes_inputs_through
    behind = torch.randn(17)[1:].view(4, 4)
    assert behind.data_ptr() % 16
    for a, b in ((x, y), (x.t(), y), (behind, behind.t()), (x, x), (nn.Parameter(x), y[:1].expand(4, 4))):
        with torch.no_grad():
            torch.testing.assert_close(called(programs, x=a, y=b), mixed(a, b))


def test_dtensors_are_read_in_the_planned_layout_only() -> None:
    """A DTensor in another layout is refused: its local tensor is not what the program reads."""
    read = reader(Layout.parse("R"), cast(BoundProgram, SimpleNamespace(device=torch.device("cpu"))), "y")
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        given = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])
        assert read(given) is given
        with pytest.raises(PlanError, match=r"y is a DTensor in S\(0\), the plan reads it in R"):
            read(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    finally:
        dist.destroy_process_group()


def test_dtensors_pass_through() -> None:
    """On an axis of one rank, in whatever layout."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    programs = programs_of(mixed, x, y)
    assert runner_of(programs).passes_inputs_through
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        for placement in (Replicate(), Shard(0)):
            torch.testing.assert_close(called(programs, x=x, y=distribute_tensor(y, mesh, [placement])), mixed(x, y))
    finally:
        dist.destroy_process_group()


class Affine(nn.Module):
    """Its weight has the shape of the input, so that only the numbers show whether the two are swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x - self.weight


def test_a_given_plan_reads_inputs_in_its_own_order() -> None:
    model, x = Affine(), torch.randn(4, 4)
    with torch.no_grad():
        plan = fxshard.plan(model, (x,), ONE, train=False)
        programs = programs_of(model, x, plan=plan)
        runner = runner_of(programs)
        assert runner.program.plan.graph_hash == plan.graph_hash
        assert runner.places == [1, 0] and not runner.passes_inputs_through
        again = torch.randn(4, 4)
        torch.testing.assert_close(called(programs, x=again, weight=model.weight), model(again))


def test_inputs_on_another_device_are_not_passed_through() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    compiled = runner_of(programs_of(mixed, x, y)).compiled
    held, outputs = {"x": x, "y": y}, [Output(computed=True)]
    for device, passed in (("cpu", True), ("meta", False)):
        other = replace(compiled, bound=replace(compiled.bound, device=torch.device(device)))
        assert graph_runner(other, held, outputs, [False], 1.0).passes_inputs_through == passed


def test_plain_tensors_that_the_plan_shards_are_sliced() -> None:
    """As rank 1 of two in a fake group: its all-reduce adds nothing, or this rank's part a second time."""
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    dist.init_process_group("fake", rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        options = {"mesh": mesh, "compiler": "eager", "pins": {"x": "S(0)", "y": "S(0)"}, "cache": False}
        compiled = torch.compile(lambda x, y: (x * y).sum(), backend="fxshard", options=options)
        for a, b in ((x, y), (y, x)):
            own = (a[2:] * b[2:]).sum()
            assert any(torch.isclose(compiled(a, b), part) for part in (own, 2 * own))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_a_call_in_any_mode(compiler: str) -> None:
    """With gradients, without, in inference mode and under autocast, in turn."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    compiled = sharded(model, compiler=compiler)
    grad = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for _ in range(2):
        out = compiled(x)
        for have, want in zip(torch.autograd.grad(out.square().sum(), list(model.parameters())), grad, strict=True):
            torch.testing.assert_close(have, want)
        for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
            with mode:
                have, want = compiled(x), model(x)
            assert (have.requires_grad, have.is_inference(), have.dtype) == (want.requires_grad, want.is_inference(), want.dtype)
            torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2)
