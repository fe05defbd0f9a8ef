"""A parallelized module as its user sees it, on two ranks: parameters, optimizers, modes, shapes, inputs, outputs, errors."""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fxshard
from fxshard.errors import OptionError, PlanError, RunError, TraceError
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.constraints import Equal, Forbid, Pin
from fxshard.runtime.calls.inputs import local_batch
from fxshard.runtime.module.module import parallelize
from fxshard.runtime.ranks.record import record_collectives
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.random_plan import random_plan
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Tied and unused parameters, batch norm, a buffer, keyword arguments, nested outputs, sizes that 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 7)
        self.c, self.d = nn.Linear(10, 6, bias=False), nn.Linear(10, 6, bias=False)
        self.d.weight = self.c.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((7,), 2.0))

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Any]:
        h = self.norm(F.relu(self.a(x)))
        y = self.b(h) * self.scale
        return {"y": y if shift is None else y + shift, "z": [self.c(h), self.d(h.sin())], "n": h.argmax(-1)}


def loss_of(out: dict[str, Any]) -> Tensor:
    return out["y"].square().sum() + out["z"][0].sum() * 2 + out["z"][1].cos().sum()


def mesh(name: str = "dp") -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def same(have: Tensor, want: Tensor, rtol: float = 1e-9) -> None:
    have = have.full_tensor() if isinstance(have, DTensor) else have
    assert have.shape == want.shape
    assert float((have - want).double().norm()) <= rtol * max(float(want.double().norm()), 1e-6)


def same_tree(have: Any, want: Any) -> None:
    flat, spec = torch.utils._pytree.tree_flatten(want)
    mine, my_spec = torch.utils._pytree.tree_flatten(have)
    assert spec == my_spec
    for x, y in zip(mine, flat, strict=True):
        same(x, y)


def doubles() -> tuple[Net, Net, Tensor]:
    torch.set_default_dtype(torch.float64)
    model = Net()
    return model, copy.deepcopy(model), torch.randn(5, 6)


def train(model: nn.Module, reference: nn.Module, call: Any, steps: int = 2) -> None:
    """Runs steps of SGD with momentum, with two backward passes each; outputs, gradients, parameters and buffers agree."""
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, reference))
    for _ in range(steps):
        for _ in range(2):
            have, want = call(model), call(reference)
            same_tree(have, want)
            loss_of(have).backward()
            loss_of(want).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(p, DTensor) and (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                assert p.grad.placements == p.placements
                same(p.grad, q.grad)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for have, want in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        same(have, want)


def training_evaluation_training() -> None:
    """With the solver's plan and with a random one; parameters keep their layouts in all programs."""
    for seed in (None, 1):
        model, reference, x = doubles()
        names, shift = list(model.state_dict()), torch.randn(7)
        plan = None if seed is None else random_plan(model, (x,), mesh(), seed, example_kwargs={"shift": shift}, whole_outputs=True)
        assert parallelize(model, (x,), mesh(), plan, example_kwargs={"shift": shift}, compiler="eager") is model
        assert list(model.state_dict()) == names and model.c.weight is model.d.weight
        layouts = {n: p.placements for n, p in model.named_parameters()}
        train(model, reference, lambda m, x=x, s=shift: m(x, shift=s))
        for m in (model, reference):
            m.eval()
        with torch.no_grad():
            for batch in (x, x[:3]):
                out = model(batch, shift=shift)
                assert not out["y"].requires_grad
                same_tree(out, reference(batch, shift=shift))
        for m in (model, reference):
            m.train()
        train(model, reference, lambda m, x=x, s=shift: m(x, shift=s))
        assert {n: p.placements for n, p in model.named_parameters()} == layouts
        assert [p.train for p in model.forward.programs] == [True, False, False]


def own_batches() -> None:
    """The ranks have their own batches, of 3 and 2 rows; outputs are DTensors."""
    model, reference, x = doubles()
    device_mesh = mesh()
    mine = local_batch(x.chunk(2)[dist.get_rank()], device_mesh)
    assert mine.shape == x.shape and mine.placements == (Shard(0),)
    parallelize(model, (mine,), device_mesh, compiler="eager", input_layouts={"args[0]": "S(0)"})
    out = model(mine)
    assert isinstance(out["y"], DTensor)
    same_tree(torch.utils._pytree.tree_map(lambda t: t.full_tensor(), out), reference(x))
    out["y"].square().sum().backward()
    reference(x)["y"].square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        if p.grad is not None:  # one program computes all gradients: zeros where the loss does not use an output
            same(p.grad, torch.zeros(q.shape) if q.grad is None else q.grad)
    with pytest.raises(RunError, match=r"split into \[2, 1\], but the ranks hold \[1, 2\]"):
        local_batch(torch.ones(dist.get_rank() + 1, 2), device_mesh)


def gradients_of_inputs() -> None:
    """Plain inputs get plain gradients in whichever layout they are, with no collective that the program does not list; a given plan that
    leaves the gradient sharded is refused."""
    for options in ({}, {"input_layouts": {"args[0]": "S(0)"}}, {"input_layouts": {"args[0]": "S(1)"}}):
        model, reference, values = doubles()
        x, y = values.clone().requires_grad_(), values.clone().requires_grad_()
        parallelize(model, (x,), mesh(), compiler="eager", **options)
        with record_collectives() as issued:
            loss_of(model(x)).backward()
        assert len(issued) == len(model.forward.programs[0].collectives)
        loss_of(reference(y)).backward()
        assert not isinstance(x.grad, DTensor)
        same(x.grad, y.grad)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert q.grad is None or p.grad is not None
            same(torch.zeros(q.shape) if p.grad is None else p.grad, torch.zeros(q.shape) if q.grad is None else q.grad)
    model, _, values = doubles()
    plan = fxshard.plan(model, (x,), mesh(), input_layouts="S(0)", output_layouts="R")
    with pytest.raises(PlanError, match=r"args\[0\] is a plain tensor planned in S\(0\), its gradient(.|\n)*plan with input_layouts="):
        parallelize(model, (x,), mesh(), plan, compiler="eager")
    model, reference, values = doubles()
    parallelize(model, (values,), mesh(), compiler="eager", input_layouts={"args[0]": "S(0)"})
    same(model(values)["y"], reference(values)["y"])


def between_other_layers() -> None:
    """Words shard plain inputs that need gradients: of a part between eager layers, and of a second model."""
    torch.set_default_dtype(torch.float64)
    for word, compiler in (("ddp", "eager"), ("fsdp", "eager"), ("cp", "eager"), ("fsdp", "inductor")):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.GELU(), nn.Linear(6, 6))
        reference, x = copy.deepcopy(layers), torch.randn(3, 4, 6)
        fxshard.parallelize_module(layers[1], mesh(), {"dp": word}, compiler=compiler)
        fxshard.parallelize(layers[3], (x,), mesh(), compiler=compiler, parallel={"dp": word})
        have, want = layers(x), reference(x)
        same(have, want)
        have.square().sum().backward()
        want.square().sum().backward()
        for p, q in zip(layers.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            same(p.grad, q.grad)
        for program in (*layers[1].forward.programs, *layers[3].forward.programs):
            (taken,) = (at for end, at in zip(program.inputs, program.input_layouts, strict=True) if end.kind == "input")
            assert str(taken) == ("S(1)" if word == "cp" else "S(0)")
        leaf, its = x.clone().requires_grad_(), x.clone().requires_grad_()  # the part planned again, for a leaf
        layers[1](leaf).sin().sum().backward()
        reference[1](its).sin().sum().backward()
        assert type(leaf.grad) is Tensor and its.grad is not None
        same(leaf.grad, its.grad)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(y)


def an_input_without_a_gradient() -> None:
    """A loss of one of two results: the input of the other has no gradient, as on one device."""
    torch.manual_seed(0)
    model, values = TwoHeads().double(), torch.randn(2, 4, 6, dtype=torch.float64)
    reference = copy.deepcopy(model)
    x, y = (value.clone().requires_grad_() for value in values)
    v, w = (value.clone().requires_grad_() for value in values)
    fxshard.parallelize(model, (x, y), mesh(), compiler="eager", parallel={"dp": "ddp"})(x, y)[1].square().sum().backward()
    reference(v, w)[1].square().sum().backward()
    assert x.grad is None and v.grad is None and y.grad is not None and w.grad is not None
    same(y.grad, w.grad)


def sharded_outputs_need_dtensors() -> None:
    """Plain arguments with a plan that shards an output raise an error before anything runs; with a DTensor argument it is a DTensor."""
    torch.set_default_dtype(torch.float64)
    model, x = nn.Linear(4, 6), torch.randn(4, 4)
    planned = {"input_layouts": "R", "pins": {"weight": "S(0)", "bias": "S(0)"}, "output_layouts": "S(1)"}
    said = r"outputs\[0\] is planned in S\(1\)(.|\n)*output_layouts='R'"
    for options in ({"plan": fxshard.plan(model, (x,), mesh(), **planned)}, planned):
        with pytest.raises(PlanError, match=said):
            parallelize(copy.deepcopy(model), (x,), mesh(), compiler="eager", **options)
    program = fxshard.export(model, (x,), mesh(), **planned)
    bound = program.bind(mesh(), compiler="eager")
    with record_collectives() as issued:
        with pytest.raises(PlanError, match=said):
            bound(x)
        out = bound(DTensor.from_local(x, mesh(), [Replicate()], run_check=False))
    assert isinstance(out, DTensor) and out.placements == (Shard(1),) and len(issued) == len(program.collectives)
    same(out, model(x))
    with pytest.raises(RunError, match=r"the argument args\[1\] is unexpected"):
        bound(x, 3)
    buffered = nn.BatchNorm1d(4)
    plan = fxshard.plan(buffered, (x,), mesh(), pins={"running_mean": "S(0)"}, input_layouts="S(1)", output_layouts="R")
    with pytest.raises(PlanError, match=r"running_mean is a plain tensor planned in S\(0\), its new value"):
        parallelize(buffered, (x,), mesh(), plan, compiler="eager")


def dumps() -> None:
    """The first rank writes one folder per program; a failed trace leaves its error there; planning again logs a warning."""
    torch.set_default_dtype(torch.float64)
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    folder, x = Path(str(found[0])), torch.randn(4, 6)
    model = parallelize(nn.Linear(6, 2), (x,), mesh(), compiler="eager", dump=folder / str(dist.get_rank()))
    with torch.no_grad(), Heard(logging.WARNING) as said:
        model(x[:2])
    assert said.texts == (["planning again for inference: args[0] (2, 6)"] if dist.get_rank() == 0 else [])
    with pytest.raises(fxshard.FxshardError):
        parallelize(Branch(), (x,), mesh(), compiler="eager", dump=folder / f"branch{dist.get_rank()}")
    dist.barrier()
    assert sorted(p.name for p in folder.iterdir()) == ["0", "branch0"]
    names = ["trace", "annotate", "constrain", "formulate", "choose", "verify", "lower"]
    names += ["schedule", "chunk", "bucket", "bind", "partition", "merge", "expand_draws", "compile"]
    for program in ("00_train", "01_eval"):
        assert sorted(p.name for p in (folder / "0" / program).iterdir()) == [f"{i:02d}_{n}.txt" for i, n in enumerate(names)]
    assert "\nbackward\n" in (folder / "0" / "00_train" / "11_partition.txt").read_text()
    assert [p.name for p in (folder / "branch0" / "00_train").iterdir()] == ["00_trace.failed.txt"]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


class Branch(nn.Module):
    """Branches on data, so that it cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def autocast() -> None:
    """Traced and run under autocast, a model gives the numbers of one device: the graph has each cast once."""
    torch.set_default_dtype(torch.float32)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 2)), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parallelize(model, (x,), mesh(), compiler="eager", pins={"0.weight": "S(0)"})
        have, want = model(x), reference(x)
        assert have.dtype == want.dtype == torch.bfloat16
        have.float().square().sum().backward()
        want.float().square().sum().backward()
    same(have, want, 1e-2)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        same(p.grad, q.grad, 2e-2)
    same(model(x), reference(x), 1e-6)


def submodule() -> None:
    """A submodule of a plain model, with hooks from before and after parallelize; the loss is outside of it."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)), nn.Linear(6, 2))
    reference, x = copy.deepcopy(model), torch.randn(4, 6)
    constraints = [Pin("0.weight", "S(0)"), Equal("2.bias", "0.bias"), Forbid("2.weight", "R"), Forbid("2.weight", "S(0)")]
    model[1].register_forward_hook(lambda module, inputs, out: out.cos())
    reference[1].register_forward_hook(lambda module, inputs, out: out.cos())
    parallelize(model[1], (x,), mesh(), compiler="eager", constraints=constraints)
    for m in (model, reference):
        m[1].register_forward_hook(lambda module, inputs, out: out * 3)
        m[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        same(p.grad, q.grad)
    assert model[1][0].weight.grad.placements == (Shard(0),) and model[1][2].weight.placements == (Shard(1),)
    with torch.no_grad():  # another program, to which the constraints apply by name too
        same(model(x), reference(x))


def from_meta() -> None:
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        model = Net()
    parallelize(model, (torch.empty(5, 6, device="meta"),), mesh(), compiler="eager", pins={"b.weight": "S(0)"})
    assert model.b.weight.is_meta and model.b.weight.to_local().shape == (4 - dist.get_rank(), 10)
    x, reference = torch.randn(5, 6), Net()
    with pytest.raises(RunError, match=r"on meta(.|\n)*to_empty"):
        model(x)
    model.to_empty(device="cpu")
    set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    same_tree(model(x), reference(x))


def dropout() -> None:
    """The mask depends on torch.manual_seed alone: two ranks drop the elements that the simulator drops on another mesh."""
    torch.set_default_dtype(torch.float64)
    model, x = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.4), nn.Linear(10, 4)), torch.randn(5, 6)
    graph, four = trace(model, (x,)), Mesh({"a": 2, "b": 2})
    program = lower_plan(graph, plan_graph(graph, four, Request(pins={"0.weight": "S(0)S(0)"})))
    torch.manual_seed(7)
    want = simulate_program(program, program_values(program, model, (x,)))
    parallelize(model, (x,), mesh(), compiler="eager", pins={"0.weight": "S(0)", "2.weight": "S(1)"})
    torch.manual_seed(7)
    out = model(x)
    out.sum().backward()
    same(out, want.outputs)
    same(model[0].weight.grad, want.grads["0.weight"])
    assert not torch.equal(model(x), out)


def modes() -> None:
    """``train`` must agree with the plan or be left out. Only one rank logs."""
    torch.set_default_dtype(torch.float64)
    x, said = torch.randn(4, 6), Heard(logging.INFO)
    plan = fxshard.plan(nn.Linear(6, 2), (x,), mesh(), train=False, input_layouts="R", output_layouts="R")
    with pytest.raises(PlanError, match="the plan is for inference, train=True asks for training"):
        parallelize(nn.Linear(6, 2), (x,), mesh(), plan, train=True, compiler="eager")
    with said:
        for train in (None, False):
            model = parallelize(nn.Linear(6, 2), (x,), mesh(), plan, train=train, compiler="eager")
            assert [p.train for p in model.forward.programs] == [False]
        assert [p.train for p in parallelize(nn.Linear(6, 2), (x,), mesh(), compiler="eager").forward.programs] == [True]
    text = "{} program on dp=2, number of collectives: 0"
    assert said.texts == [text.format(kind) for kind in ("inference", "inference", "training") if dist.get_rank() == 0]


class Heard(logging.Handler):
    """Collects what fxshard logs inside the ``with`` block, from ``level`` on."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Heard:
        logger = logging.getLogger("fxshard")
        self.before = logger.level
        logger.setLevel(min(self.level, logger.getEffectiveLevel()))
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fxshard").removeHandler(self)
        logging.getLogger("fxshard").setLevel(self.before)


def errors() -> None:
    torch.set_default_dtype(torch.float64)
    x = torch.randn(4, 6)
    with pytest.raises(OptionError, match="did you mean 'compiler'"):
        parallelize(Net(), (x,), mesh(), compile="eager")
    with pytest.raises(OptionError, match="unknown compiler 'inducter'"):
        parallelize(Net(), (x,), mesh(), compiler="inducter")
    with pytest.raises(PlanError, match="mesh a=4, not dp=2"):
        parallelize(Net(), (x,), mesh(), random_plan(Net(), (x,), Mesh({"a": 4})), compiler="eager")
    for options, said in (
        ({"pins": 5}, "pins map names to layouts, these are an int"),
        ({"timeout": "x"}, "'timeout' is 'x'"),
        ({"timeout": None}, "'timeout' is None"),
        ({"memory_limit": "1 GBs"}, "cannot read '1 GBs' as a number of bytes"),
        ({"objective": "speed"}, "unknown objective 'speed'"),
        ({"dump": 3}, "dump is an int"),
        ({"planner": 3}, "the planner is an int"),
        ({"plan": random_plan(Net(), (x,), mesh()), "pins": {"b.weight": "R"}}, "pins would be ignored"),
        ({"plan": random_plan(Net(), (x,), mesh()), "constraints": [Pin("b.weight", "R")]}, "constraints would be ignored"),
        ({"constraints": {"b.weight": "R"}}, "constraints are given as a dict"),
        ({"plan": 3}, "plan is an int"),
    ):
        with pytest.raises(OptionError, match=said) as error:
            parallelize(Net(), (x,), mesh(), **{"compiler": "eager", **options})
        assert error.value.remedy
    for batch, size in ((3, None), (x, "x")):
        with pytest.raises(OptionError, match="batch is"):
            local_batch(batch, mesh(), size=size)
    with pytest.raises(PlanError, match="another graph"):
        parallelize(Net(), (x,), mesh(), random_plan(Net(), (x[:2],), mesh()), compiler="eager")
    model = parallelize(Net(), (x,), mesh(), compiler="eager")
    for again in (lambda m: fxshard.plan(m, (x,), mesh()), lambda m: parallelize(m, (x,), mesh(), compiler="eager")):
        with pytest.raises(RunError, match=r"is parallelized already(.|\n)*before parallelize") as error:
            again(model)
        assert str(error.value).count("to do") == 1
    with pytest.raises(RunError, match=r"differ in the value of args\[0\]: rank 0: checksum(.|\n)*local_batch"):
        model(x + dist.get_rank())
    with pytest.raises(TraceError, match=r"the forward of Net raises RuntimeError: .*\[4, 5\]"):
        model(x[:, :5])
    bound = fxshard.export(nn.Linear(6, 2), (x,), mesh()).bind(mesh(), compiler="eager")
    for called in (model, bound):
        with pytest.raises(RunError, match=r"input args\[0\] has no memory: it is on meta"):
            called(x.to("meta"))
    with pytest.raises(RunError, match=r"the program takes \(4, 6\)(.|\n)*plan \(export\) again"):
        bound(x[:3])
    with pytest.raises(RunError, match=r"differ in the shape of args\[0\]: rank 0: \(4, 6\) .*; rank 1: \(3, 6\)(.|\n)*local_batch"):
        parallelize(Net(), (x[: 4 - dist.get_rank()],), mesh(), compiler="eager")
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RunError, match=r"differ in the weights of a.weight: rank 0: checksum(.|\n)*of a.bias(.|\n)*torch.manual_seed"):
        parallelize(Net(), (x,), mesh(), compiler="eager")
    layouts = {n: Layout(p.placements) for n, p in model.named_parameters()}
    assert set(map(str, layouts.values())) <= {"R", "S(0)", "S(1)"}


found, test_two_ranks = two_ranks(
    training_evaluation_training,
    own_batches,
    gradients_of_inputs,
    between_other_layers,
    an_input_without_a_gradient,
    sharded_outputs_need_dtensors,
    dumps,
    autocast,
    submodule,
    from_meta,
    dropout,
    modes,
    errors,
)
