"""Plans made ahead of models that torch has distributed already: ``parallelize_module``, ``fully_shard``, both; nothing is sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.errors import ConstraintError, OptionError, RunError, TraceError
from fxshard.layout.layouts import Layout

Make = Callable[[DeviceMesh], nn.Module]
Placements = dict[str, Placement]
AHEAD = fxshard.Mesh({"dp": 2, "tp": 2})


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(12, 6, bias=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 7:
            raise ValueError("seven columns")
        return self.down(torch.relu(self.up(x)))


class Scaled(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Perceptron(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def fully_sharded(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    model = Perceptron() if model is None else model
    for module in (model.up, model):
        fully_shard(module, mesh=mesh["dp"])
    return model


def both(mesh: DeviceMesh) -> nn.Module:
    return fully_sharded(mesh, tensor_parallel(mesh))


WAYS = pytest.mark.parametrize(
    ("make", "up", "down"),
    [
        (tensor_parallel, {"tp": Shard(0)}, {"tp": Shard(1)}),
        (fully_sharded, {"dp": Shard(0)}, {"dp": Shard(0)}),
        (both, {"dp": Shard(1), "tp": Shard(0)}, {"dp": Shard(0), "tp": Shard(1)}),
    ],
)


@WAYS
@pytest.mark.parametrize("ahead", [False, True])
def test_parameters_keep_their_layouts(make: Make, up: Placements, down: Placements, ahead: bool, mesh: DeviceMesh) -> None:
    """On the axes on which they are; where both shard one dim, fully_shard's axis shards the other. The model stays what it is, and
    parallelize takes the plan."""
    model = make(mesh)
    before = [(p, p.placements) for p in model.parameters() if isinstance(p, DTensor)]
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks), type(m)) for m in model.modules()]
    plan = fxshard.plan(model, (torch.randn(8, 6),), AHEAD if ahead else mesh, output_layouts="RR", cache=False)
    for name, want in (("up.weight", up), ("down.weight", down)):
        found = dict(zip(AHEAD.axis_names, plan.layout_of(name), strict=True))
        assert want.items() <= found.items()
    assert [(p, p.placements) for p in model.parameters() if isinstance(p, DTensor)] == before
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks), type(m)) for m in model.modules()] == hooks
    assert isinstance(model, FSDPModule) == (make is not tensor_parallel)
    if not ahead:
        sharded = fxshard.parallelize(model, (torch.randn(8, 6),), mesh, plan, compiler="eager")
        for name in ("up.weight", "down.weight"):
            assert Layout(sharded.get_parameter(name).placements) == plan.layout_of(name)


@WAYS
def test_the_lowered_program_has_one_device_s_numbers(make: Make, up: Placements, down: Placements, mesh: DeviceMesh) -> None:
    """Simulated with whole weights in float64, gradients too, on uneven shards."""
    torch.set_default_dtype(torch.float64)
    try:
        reference, model, x = Perceptron(), make(mesh), torch.randn(5, 6)
        plan = fxshard.plan(model, (x,), AHEAD, cache=False)
        ran = fxshard.simulate(fxshard.lower(model, (x,), plan), (x,), weights=dict(reference.named_parameters()))
        reference(x).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(ran.outputs, reference(x), rtol=1e-9, atol=1e-9)
    for name in ("up.weight", "down.weight"):
        torch.testing.assert_close(ran.grads[name], reference.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


def test_arguments_keep_theirs_unless_the_request_says_otherwise(mesh: DeviceMesh) -> None:
    rows = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Replicate()])
    planned = lambda **given: str(fxshard.plan(Perceptron(), (rows,), mesh, cache=False, **given).layout_of("args[0]"))  # noqa: E731
    assert planned() == planned(input_layouts={}) == "S(0)R"
    assert (
        planned(input_layouts={"args[0]": "RS(0)"})
        == planned(input_layouts="RS(0)")
        == planned(input_layouts={"tp": Shard(0), "dp": Replicate()})
        == "RS(0)"
    )


def test_a_pin_of_the_same_name_counts_instead(mesh: DeviceMesh) -> None:
    plan = fxshard.plan(both(mesh), (torch.randn(8, 6),), mesh, pins={"up.weight": "RR"}, cache=False)
    assert str(plan.layout_of("up.weight")) == "RR" and str(plan.layout_of("down.weight")) == "S(0)S(1)"


@pytest.mark.parametrize("pin", ["up.weight", "down.weight", "*.weight"])
def test_a_glob_or_another_name_of_a_tied_parameter_counts_too(pin: str, mesh: DeviceMesh) -> None:
    model = Perceptron()
    model.up, model.down = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    model.up.weight = model.down.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh["tp"], [Shard(0)]))
    x = torch.randn(8, 6)
    assert str(fxshard.plan(model, (x,), mesh, cache=False).layout_of("up.weight"))[-4:] == "S(0)"
    assert str(fxshard.plan(model, (x,), mesh, pins={pin: "RR"}, cache=False).layout_of("up.weight")) == "RR"
    sharded = fxshard.parallelize(model, (x,), mesh, pins={pin: "RR"}, compiler="eager", cache=False)
    assert sharded.up.weight is sharded.down.weight and Layout(sharded.up.weight.placements).is_replicated


def styled_by_fxshard(mesh: DeviceMesh) -> nn.Module:
    return fxshard.parallelize_module(Perceptron(), mesh, {"tp": {"up": ColwiseParallel(), "down": RowwiseParallel()}})


@pytest.mark.parametrize(
    ("make", "run"),
    [(make, run) for make in (tensor_parallel, both) for run in (fxshard.plan, fxshard.parallelize)]
    + [(styled_by_fxshard, fxshard.parallelize)],
)
def test_a_contradiction_says_that_a_layout_is_that_of_a_dtensor(make: Make, run: Callable[..., object], mesh: DeviceMesh) -> None:
    """Not that it is a pin, which nobody wrote."""
    beside = {"up.weight": r"S\(1\) on dp and ", "down.weight": r"S\(0\) on dp and "} if make is both else {}
    equal = [fxshard.Equal("up.weight", "down.weight")]
    with pytest.raises(ConstraintError) as caught:
        run(make(mesh), (torch.randn(8, 6),), mesh, constraints=equal, cache=False)
    assert "pins[" not in str(caught.value)
    for name, on in (("up.weight", r"S\(0\) on tp"), ("down.weight", r"S\(1\) on tp")):
        said = rf"{name} in {beside.get(name, '')}{on}, as the DTensor that it is already \(pins= would count instead\)"
        assert re.search(said, caught.value.what), caught.value.what
    pinned = fxshard.plan(tensor_parallel(mesh), (torch.randn(8, 6),), mesh, constraints=equal, pins={"*.weight": "RR"}, cache=False)
    assert pinned.layout_of("up.weight") == pinned.layout_of("down.weight")


def test_a_contradiction_in_the_backend_says_so_too(mesh: DeviceMesh) -> None:
    """It leaves DTensors where they are, so that no pin would count instead."""
    torch._dynamo.reset()
    model = Perceptron()
    for part, dim in ((model.up, 0), (model.down, 1)):
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh, [Replicate(), Shard(dim)]))
    options = {"mesh": mesh, "compiler": "eager", "cache": False, "constraints": [fxshard.Equal("up.weight", "down.weight")]}
    x = distribute_tensor(torch.randn(8, 6), mesh, [Replicate(), Replicate()])
    said = r"up.weight in R on dp and S\(0\) on tp, as the DTensor that it is already; down.weight in .* that it is already; Equal"
    with pytest.raises(ConstraintError, match=said):
        torch.compile(model, backend="fxshard", options=options)(x)


def test_a_contradiction_says_so_of_arguments_too(mesh: DeviceMesh) -> None:
    rows = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Replicate()])
    said = r"args\[0\] in S\(0\) on dp and R on tp, as the DTensor that it is already \(input_layouts= would count instead\); Forbid"
    with pytest.raises(ConstraintError, match=said):
        fxshard.plan(Perceptron(), (rows,), mesh, constraints=[fxshard.Forbid("args[0]", "S(0)R")], cache=False)


def of_one_dim(mesh: DeviceMesh) -> nn.Module:
    """Rows on both axes."""
    model = Perceptron()
    for part in (model.up, model.down):
        part.weight = nn.Parameter(distribute_tensor(part.weight.detach(), mesh, [Shard(1), Shard(0)]))
    return model


def with_one_row(mesh: DeviceMesh) -> nn.Module:
    """One rank has the row, and a word for the axis would keep it whole."""
    model = Perceptron()
    model.up, model.down = nn.Linear(6, 1, bias=False), nn.Linear(1, 6, bias=False)
    return fully_sharded(mesh, model)


S0, S1 = r"S\(0\)", r"S\(1\)"


OVERRULED = pytest.mark.parametrize(
    ("make", "words", "said"),
    [
        (
            fully_sharded,
            {"dp": "ddp"},
            rf"DataParallel\(\)\}} does not count for parameters that are DTensors already \(2\).*: up.weight in {S0} on dp, down",
        ),
        (both, {"dp": "ddp", "tp": "auto"}, rf"DataParallel\(\)\}} .*: up.weight in {S1} on dp, down.weight in {S0} on dp$"),
        (
            tensor_parallel,
            {"tp": {"up": "rowwise"}},
            rf"{{'up': 'rowwise'}}}} does not count for parameters that are DTensors already \(1\).*: up.weight in {S0} on tp$",
        ),
        (of_one_dim, {"dp": fxshard.FullyShard()}, ""),  # dim 0 is sharded on tp: another will do
        (fully_sharded, {"dp": "fsdp", "tp": "tp"}, ""),
        (with_one_row, {"dp": "fsdp"}, ""),
        (both, {"dp": "fsdp", "tp": "tp"}, ""),
        (tensor_parallel, {"dp": "ddp", "tp": {"up": "colwise", "down": "rowwise"}}, ""),
    ],
)


def overruled(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "does not count for" in record.getMessage()]


@OVERRULED
@pytest.mark.parametrize("run", [fxshard.plan, fxshard.parallelize])
def test_a_word_that_dtensors_overrule_is_a_warning(
    run: Callable[..., object], make: Make, words: dict[str, object], said: str, mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    run(make(mesh), (torch.randn(8, 6),), mesh, parallel=words, cache=False)
    found = overruled(caplog)
    assert len(found) == bool(said) and all(re.search(said, text) for text in found), found


def test_a_word_that_styles_overrule_is_a_warning_too(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    styles = {"tp": {"up": ColwiseParallel(), "down": RowwiseParallel()}}
    more = {"example_args": (torch.randn(8, 6),), "compiler": "eager", "cache": False}
    fxshard.parallelize_module(Perceptron(), mesh, styles, parallel={"tp": {"down": "rowwise"}}, **more)
    assert not overruled(caplog)
    fxshard.parallelize_module(Perceptron(), mesh, styles, parallel={"tp": {"up": "rowwise"}}, **more)
    (said,) = overruled(caplog)
    assert said.endswith("up.weight in S(0) on tp")


@pytest.mark.parametrize("run", [fxshard.plan, fxshard.parallelize])
def test_no_word_is_warned_of_where_pins_say_otherwise(
    run: Callable[..., object], mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    run(fully_sharded(mesh), (torch.randn(8, 6),), mesh, parallel={"dp": "ddp"}, pins={"*.weight": {"dp": Replicate()}}, cache=False)
    assert not overruled(caplog)


def test_a_later_program_warns_of_no_word(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    """Its layouts are those of the first plan, which pins decided."""
    pins = {"up.weight": {"dp": Replicate()}}
    options = {"parallel": {"dp": "fsdp"}, "pins": pins, "compiler": "eager", "cache": False}
    sharded: Any = fxshard.parallelize(Perceptron(), (torch.randn(8, 6),), mesh, **options)
    with torch.no_grad():
        sharded(torch.randn(4, 6))
    assert len(sharded.forward.programs) > 1 and not overruled(caplog)


def test_buffers_are_replicated(mesh: DeviceMesh) -> None:
    """As parallelize takes them; a sharded one is refused by name."""
    model, x = Scaled(), torch.randn(8, 6)
    model.register_buffer("scale", distribute_tensor(torch.ones(6), mesh, [Replicate(), Replicate()]))
    assert str(fxshard.plan(model, (x,), mesh, cache=False).layout_of("scale")) == "RR"
    model.register_buffer("scale", distribute_tensor(torch.ones(6), mesh["tp"], [Shard(0)]))
    with pytest.raises(OptionError, match=r"buffer scale is a DTensor in S\(0\), and buffers are replicated"):
        fxshard.plan(model, (x,), mesh)


def test_arguments_are_on_the_whole_mesh(mesh: DeviceMesh) -> None:
    part = distribute_tensor(torch.randn(8, 6), mesh["dp"], [Shard(0)])
    with pytest.raises(OptionError, match=r"args\[0\] is a DTensor on .*, a part of dp=2,tp=2"):
        fxshard.plan(Perceptron(), (part,), mesh)


def test_fully_shard_is_put_back_if_tracing_fails(mesh: DeviceMesh) -> None:
    model = both(mesh)
    with pytest.raises(TraceError, match="seven columns"):
        fxshard.plan(model, (torch.randn(8, 7),), mesh)
    assert isinstance(model, FSDPModule) and isinstance(model.up, FSDPModule)
    fxshard.plan(model, (torch.randn(8, 6),), mesh, cache=False)


@pytest.mark.parametrize("make", [tensor_parallel, fully_sharded, both])
def test_what_needs_whole_weights_is_refused(make: Callable[[DeviceMesh], nn.Module], mesh: DeviceMesh) -> None:
    """Before anything is planned, with what to do."""
    model, x = make(mesh), torch.randn(8, 6)
    what = "up.weight is a DTensor" if make is tensor_parallel else "the model is under fully_shard"
    for run in (False, True):
        if run and make is fully_sharded:
            model(x)  # the root holds whole parameters from now on
        for call, remedy in (
            (lambda: fxshard.export(model, (x,), mesh), "give the plain model and plain arguments, and the layouts as pins"),
            (lambda: fxshard.simulate(model, (x,), mesh=AHEAD), "fxshard.lower"),
            (lambda: fxshard.plan_pipeline(model, (x,), fxshard.Mesh({"pp": 2, "tp": 2}), microbatches=2), "say parallel="),
        ):
            with pytest.raises(OptionError, match=f"{what}, of which this process has a shard") as caught:
                call()
            assert remedy in str(caught.value)


def test_exports_take_whole_arguments(mesh: DeviceMesh) -> None:
    rows = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Replicate()])
    with pytest.raises(OptionError, match=r"args\[0\] is a DTensor"):
        fxshard.export(Perceptron(), (rows,), mesh)


def test_other_meshes_and_what_no_plan_takes_over_are_refused(mesh: DeviceMesh) -> None:
    x = torch.randn(8, 6)
    for other in (fxshard.Mesh({"a": 4}), fxshard.Mesh({"dp": 4}), fxshard.Mesh({"tp": 4, "dp": 2}), mesh["dp"]):
        with pytest.raises(OptionError, match="which is no part of"):
            fxshard.plan(tensor_parallel(mesh), (x,), other)
    foreign = distribute_tensor(x, mesh["dp"], [Shard(0)])
    with pytest.raises(OptionError, match=r"args\[0\] is on .*which is no part of tp=2"):
        fxshard.plan(Perceptron(), (foreign,), fxshard.Mesh({"tp": 2}))
    policy = fully_shard(Perceptron(), mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    with pytest.raises(OptionError, match="has an mp_policy"):
        fxshard.plan(policy, (x,), mesh)
    whole = fully_shard(Perceptron(), mesh=mesh["dp"])
    with pytest.raises(OptionError, match="belong to a fully_shard of modules that are not all given"):
        fxshard.plan(whole.up, (x,), mesh)


def test_the_simulator_takes_whole_tensors(mesh: DeviceMesh) -> None:
    model, x = Perceptron(), torch.randn(8, 6)
    program, rows = fxshard.export(model, (x,), AHEAD), distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    with pytest.raises(RunError, match=r"'args\[0\]' is a DTensor, a shard of one rank"):
        fxshard.simulate(program, (rows,))
    with pytest.raises(OptionError, match=r"args\[0\] is a DTensor, of which this process has a shard"):
        fxshard.simulate(model, (rows,), mesh=AHEAD)


def test_a_mesh_without_names_is_said(mesh: DeviceMesh) -> None:
    with pytest.raises(OptionError, match="mesh_dim_names"):
        fxshard.plan(fully_shard(Perceptron()), (torch.randn(8, 6),), fxshard.Mesh({"dp": 4}))
