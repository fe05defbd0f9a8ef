"""What users do with a module besides calling it, on two ranks, against one device: copy, average, load, replace parts."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import fxshard
from examples.llama import Llama
from fxshard.errors import FxshardError, PlanError, RunError
from tests.distributed.module.test_hooks import PINS, batch, close, mesh, net, shard, step
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


def pair() -> tuple[Any, Any]:
    return shard(net()), net()


def same(model: Any, reference: Any) -> None:
    have, want = model.state_dict(), reference.state_dict()
    assert list(have) == list(want)
    close([*have.values()], [*want.values()])


def copies() -> None:
    """A copy trains separately and shares the programs of the original; it can be part of another module."""
    model, reference = pair()
    other, expected = copy.deepcopy(model), copy.deepcopy(reference)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1) for m in (model, reference)]
    for _ in range(2):
        close(step(model), step(reference))
        for optimizer in optimizers:
            optimizer.step()
    same(model, reference)
    same(other, expected)
    close(step(other), step(expected))
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for m in (other, expected) for p in copy.deepcopy(m).parameters())
    other.load_state_dict(reference.state_dict())
    same(other, reference)
    whole = copy.deepcopy(nn.Sequential(model, nn.Tanh()))
    assert whole[0].forward.programs == other.forward.programs == model.forward.programs
    close(whole(batch()), reference(batch()).tanh())
    with fxshard.no_sync(other):
        other(batch()).sum().backward()
    with pytest.raises(RunError, match=r"cannot be copied by itself"):
        copy.deepcopy(model.forward)
    for write in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(RunError, match=r"a parallelized module cannot be pickled(.|\n)*state_dict"):
            write(model)


def averages() -> None:
    """AveragedModel with a mean and with an EMA, an EMA written by hand, SWALR, update_bn."""
    model, reference = pair()
    models = (model, reference)
    mean, ema = [AveragedModel(m) for m in models], [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in models]
    own, optimizers = [copy.deepcopy(m) for m in models], [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    schedules = [SWALR(o, swa_lr=0.05, anneal_epochs=2) for o in optimizers]
    schedules += [torch.optim.lr_scheduler.CosineAnnealingLR(o, 3) for o in optimizers]
    for _ in range(3):
        close(step(model), step(reference))
        for k, m in enumerate(models):
            optimizers[k].step()
            for schedule in schedules[k::2]:
                schedule.step()
            mean[k].update_parameters(m)
            ema[k].update_parameters(m)
            with torch.no_grad():
                for p, q in zip(own[k].parameters(), m.parameters(), strict=True):
                    p.lerp_(q, 0.1)
    assert mean[0].module.forward.programs == model.forward.programs
    for have, want in (mean, ema, own):
        same(have, want)
        close(have(batch()), want(batch()))
    normed = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    found = [AveragedModel(shard(copy.deepcopy(normed))), AveragedModel(normed)]
    for one in found:
        update_bn([batch(), batch() * 2], one)
    same(*found)


def gradients_in_buckets() -> None:
    """A model whose gradients are slices of one reduced bucket can be copied in the middle of training."""
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(0))
    model: Any = fxshard.parallelize(Llama.small(layers=1), (tokens, tokens), mesh(), compiler="eager", input_layouts="S(0)", cache=False)
    model(tokens, tokens).backward()
    assert any(p.grad.to_local().storage_offset() for p in model.parameters())
    other, average = copy.deepcopy(model), AveragedModel(model)
    for parameter, copied, averaged in zip(model.parameters(), other.parameters(), average.parameters(), strict=True):
        gradient = copy.deepcopy(parameter.grad)
        assert torch.equal(parameter.grad.full_tensor(), gradient.full_tensor()) and copied.grad is None
        assert torch.equal(parameter.full_tensor(), averaged.full_tensor())
        assert gradient.to_local().untyped_storage().data_ptr() != parameter.grad.to_local().untyped_storage().data_ptr()


def loading() -> None:
    """Plain tensors and DTensors, ``strict``, ``assign``, state_dict hooks; errors name the parameter."""
    (model, reference), other = pair(), net()
    nn.init.normal_(other[0].weight)
    model.load_state_dict(other.state_dict())
    close(step(model), step(other))
    found = model.load_state_dict({"0.weight": reference[0].weight, "extra": 1}, strict=False)
    assert found.missing_keys == ["0.bias", "2.weight", "2.bias"] and found.unexpected_keys == ["extra"]
    same(model, reference)
    for wrong, said in (({"0.weight": torch.ones(2, 2)}, "size mismatch for 0.weight"), ({"x": 1}, "Unexpected key")):
        with pytest.raises(RuntimeError, match=said):
            model.load_state_dict(wrong)
    model.load_state_dict(other.state_dict(), assign=True)
    assert model[0].weight.placements == (Shard(0),)
    close(step(model), step(other))
    whole = {k: distribute_tensor(v, mesh(), [Replicate()]) for k, v in reference.state_dict().items()}
    model.load_state_dict(whole)
    close(step(model), step(reference))
    with pytest.raises(PlanError, match=r"has a value in R for parameter 0.weight, which is in S\(0\)(.|\n)*assign=False"):
        model.load_state_dict(whole, assign=True)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    close(step(model), step(reference))
    with pytest.raises(RunError, match=r"differ in the weights of 0.weight"):
        model.load_state_dict({"0.weight": torch.full((5, 4), float(dist.get_rank()))}, strict=False)
    model.register_state_dict_post_hook(lambda m, state, prefix, _: state.update({f"{prefix}mine": 1}))
    model.register_load_state_dict_pre_hook(lambda m, state, prefix, *_: state.update({"0.bias": state.pop("mine")}))
    assert model.state_dict()["mine"] == 1
    model.load_state_dict({"mine": torch.full((5,), 2.0), "0.weight": other[0].weight}, strict=False)
    close([*model[0].parameters()], [other[0].weight, torch.full((5,), 2.0)])


def loading_before_the_first_call() -> None:
    """Whole tensors and DTensors, by words and by styles, also into a copy; the first call shards what was loaded."""
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for plan in ({"tp": "fsdp"}, styles, None):
        model, other, reference = net(), net(), net()
        nn.init.normal_(other[0].weight)
        nn.init.normal_(reference[0].weight)
        fxshard.parallelize_module(model, mesh(), plan, compiler="eager")
        with pytest.raises(RunError, match=r"differ in the weights of 0.weight"):
            model.load_state_dict({"0.weight": torch.full((5, 4), float(dist.get_rank()))}, strict=False)
        held = dict(model.named_parameters())
        for m in (model, copy.deepcopy(model)):
            m.load_state_dict(other.state_dict())
            same(m, other)
            m.load_state_dict({k: distribute_tensor(v, mesh(), [Replicate()]) for k, v in reference.state_dict().items()})
            same(m, reference)
            m.load_state_dict(other.state_dict())
            close(m(batch()), other(batch()))
            assert str(m[0].weight.placements[0]) == ("R" if plan is None else "S(0)")
        model.load_state_dict(reference.state_dict())
        close(model(batch()), reference(batch()))
        assert all(held[name] is p for name, p in model.named_parameters())


def assigned_before_the_first_call() -> None:
    """``assign=True`` puts other parameters in the places of those that were there; the plan decides on them likewise."""
    for plan in ({"tp": "fsdp"}, {"0": ColwiseParallel(output_layouts=Replicate())}):
        model, other = net(), net()
        nn.init.normal_(other[2].weight)
        fxshard.parallelize_module(model, mesh(), plan, compiler="eager")
        model.load_state_dict(other.state_dict(), assign=True)
        for m in (model, other):
            m(batch()).square().sum().backward()
        close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
        assert model[0].weight.placements == (Shard(0),)
        assert "tp" not in plan or model[2].weight.placements == (Shard(0),)


def saved() -> None:
    """``torch.save`` of a state_dict, then ``torch.load`` with and without ``weights_only``."""
    model, reference = pair()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for safe in (True, False):
        file.seek(0)
        state = torch.load(file, weights_only=safe)
        assert all(isinstance(value, DTensor) for value in state.values())
        other = shard(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
        other.load_state_dict(state, assign=safe)
        close(step(other), step(reference))


def given_parameters() -> None:
    """``functional_call`` with DTensors passes gradients on to them; plain tensors and torch.func transforms are refused."""
    model, reference = pair()
    for m in (model, reference):
        own = {name: p * 2 for name, p in m.named_parameters()}
        torch.func.functional_call(m, own, (batch(),)).square().sum().backward()
    close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    assert len(model.forward.programs) == 2
    with pytest.raises(RunError, match=r"0.weight is a plain tensor, assigned after parallelize \(or by functional_call\)"):
        torch.func.functional_call(model, reference.state_dict(), (batch(),))
    for transformed in (torch.vmap(model), torch.func.grad(lambda x: model(x).sum()), lambda x: torch.func.jvp(model, (x,), (x,))):
        with pytest.raises(RunError, match=r"within a transform of torch.func(.|\n)*inside of the forward"):
            transformed(batch())
    close(step(model), step(reference))


def refused() -> None:
    """Export, TorchScript, ``share_memory`` and a move to meta raise errors that name them; the module works as before."""
    model, reference = pair()
    for function in (torch.export.export, torch.jit.trace):
        with pytest.raises(RunError, match=r"a parallelized module (.|\n)*fxshard.export"):
            function(model, (batch(),))
    with pytest.raises(RunError, match=r"in place of Python code(.|\n)*fxshard.export"):
        torch.jit.script(model)
    with pytest.raises(Unsupported, match=r"compiled already(.|\n)*fxshard.export"):
        torch.export.export(model, (batch(),), strict=True)
    assert not hasattr(model.forward, "__code__")
    for part in (model, model[0], copy.deepcopy(model)):
        with pytest.raises(RunError, match=r"share_memory of a parallelized module(.|\n)*to_local"):
            part.share_memory()
    for parameter in model.parameters():
        parameter.to_local().share_memory_()
    assert model[0].weight.to_local().is_shared()
    with pytest.raises(RunError, match=r"on meta(.|\n)*to_empty"):
        copy.deepcopy(model).to("meta")(batch())
    close(step(model), step(reference))


def dtypes_and_modes() -> None:
    """Each dtype and mode has its own program, which is reused; ``apply``, ``zero_grad`` and ``requires_grad_`` work."""
    model, reference = pair()
    for m in (model, reference):
        m.float()
    close(model(batch().float()), reference(batch().float()), 1e-5)
    for m in (model, reference):
        m.double()
        m.apply(lambda part: isinstance(part, nn.Linear) and nn.init.constant_(part.weight, 0.3))
        m[0].requires_grad_(False)
    close(step(model)[:2], step(reference)[:2])
    for m in (model, reference):
        m.zero_grad(set_to_none=False)
        m.requires_grad_(True).train(False)
        close(m[2].weight.grad, torch.zeros(3, 5))
    assert model[0].weight.grad is None
    close(model(batch()), reference(batch()))
    assert len(model.forward.programs) == 4
    tokens, table = torch.tensor([1, 2, 5]), nn.Embedding(6, 4)
    fxshard.parallelize(table, (tokens,), mesh(), compiler="eager", pins={"weight": "S(1)"})
    assert table(tokens).dtype == torch.float64 and table.bfloat16()(tokens).dtype == torch.bfloat16


def anomalies() -> None:
    """Anomaly mode checks shards of DTensors; if one rank finds NaN, all ranks raise."""
    model, reference = pair()
    with torch.autograd.detect_anomaly():
        close(step(model), step(reference))
        if dist.get_rank() == 0:
            model[2].weight.to_local().detach()[:, 0] = float("nan")
        with pytest.raises(RuntimeError, match=r"_ProgramCallBackward.* returned nan values"):
            model(batch()).sum().backward()


class Sin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def parametrized() -> None:
    """Parametrizations registered before or after parallelize, and removed. A parameter left in a pending sum is refused."""
    for before in (True, False):
        model, reference = net(), net()
        if not before:
            shard(model)
        for m in (model, reference):
            parametrize.register_parametrization(m[2], "weight", Sin())
            parametrizations.weight_norm(m[0])
        if before:
            fxshard.parallelize(model, (batch().requires_grad_(),), mesh(), compiler="eager", pins={"2.*.original": "S(0)"})
        close(step(model), step(reference))
        same(model, reference)
        if not before:
            for m in (model, reference):
                parametrize.remove_parametrizations(m[2], "weight")
            close(step(model), step(reference))
    model[2].weight = nn.Parameter(DTensor.from_local(torch.zeros_like(reference[2].weight), mesh(), [Partial()]))
    with pytest.raises(RunError, match=r"2.weight, assigned after parallelize, is in .*pending"):
        model(batch())


def parametrizations_removed() -> None:
    """Removing parametrizations that were there before parallelize leaves a plain parameter that trains, in any layout of the originals."""
    taken: Any = parametrize.remove_parametrizations
    for layout in ("S(0)", "S(1)", None):
        torch.manual_seed(1)
        last = nn.Linear(3, 4)
        model, reference = (nn.Sequential(*net(), copy.deepcopy(last)) for _ in range(2))
        for m in (model, reference):
            parametrizations.weight_norm(m[0])
            parametrize.register_parametrization(m[2], "weight", Sin())
            nn.utils.weight_norm(m[3], dim=1)
        pins = None if layout is None else dict.fromkeys(("0.*.original1", "2.*.original", "3.weight_v"), layout)
        fxshard.parallelize(model, (batch().requires_grad_(),), mesh(), compiler="eager", pins=pins)
        close(step(model), step(reference))
        for m in (model, reference):
            taken(m[0], "weight")
            taken(m[2], "weight")
            nn.utils.remove_weight_norm(m[3])
        close(step(model), step(reference))
        same(model, reference)


def other_parts() -> None:
    """A layer put into the module after parallelize works if its parameters are DTensors; otherwise an error names the parameter."""
    model, reference = pair()
    for m in (model, reference):
        torch.manual_seed(3)
        m[2] = nn.Linear(5, 3)
    with pytest.raises(FxshardError, match=r"parameter 2.weight is a plain tensor, assigned after parallelize(.|\n)*distribute_tensor"):
        model(batch())
    for name, p in list(model[2].named_parameters()):
        setattr(model[2], name, nn.Parameter(distribute_tensor(p.detach(), mesh(), [Shard(0)])))
    close(step(model), step(reference))
    for m in (model, reference):
        m.insert(2, nn.Tanh())
    close(step(model), step(reference))
    for m in (model, reference):
        del m[2]
    model[0].weight = nn.Parameter(model[0].weight.detach().redistribute(placements=[Shard(1)]))
    close(step(model), step(reference))
    assert PINS["0.weight"] == "S(0)" and model[0].weight.grad.placements == (Shard(1),)


def other_parts_before_the_first_call() -> None:
    """A part put in between ``parallelize_module`` and the first call; a second ``parallelize_module`` takes plain parameters."""
    columns = {"0": ColwiseParallel(output_layouts=Replicate())}
    for plan in ({"tp": "fsdp"}, columns):
        for again in (True, False):
            model, reference = net(), net()
            fxshard.parallelize_module(model, mesh(), plan, compiler="eager")
            for m in (model, reference):
                torch.manual_seed(3)
                m[2] = nn.Linear(5, 2)
            with pytest.raises(RunError, match=r"parameter 2.weight is a plain tensor, assigned after parallelize_module(.|\n)*optimiser"):
                model(batch())
            if again:
                fxshard.parallelize_module(model, mesh(), None if plan is columns else plan, compiler="eager")
            else:
                for name, p in list(model[2].named_parameters()):
                    setattr(model[2], name, nn.Parameter(distribute_tensor(p.detach(), mesh(), [Replicate()])))
            optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
            for m, optimizer in zip((model, reference), optimizers, strict=True):
                m(batch()).square().sum().backward()
                optimizer.step()
            same(model, reference)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(tokens)))


def tied_weights() -> None:
    """A style of one name, or of both, leaves the parameter tied, which torch unties."""
    torch.set_default_dtype(torch.float64)
    rows, columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    tokens = torch.randint(0, 16, (2, 6))
    for axes in ({"tp": 2}, {"dp": 2, "tp": 1}):
        both = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        for plan in ({"embed": rows}, {"head": columns}, {"embed": rows, "head": columns}):
            model: Any = Tied()
            reference = copy.deepcopy(model)
            fxshard.parallelize_module(model, both, {"tp": plan}, compiler="eager")
            assert model.head.weight is model.embed.weight and model.embed.weight.placements[-1] == Shard(0)
            same_after_two_steps(model, reference, tokens)
    with pytest.raises(FxshardError, match=r"embed.weight and head.weight are one parameter(.|\n)*S\(0\) on .* and S\(1\)"):
        fxshard.parallelize_module(Tied(), mesh(), {"embed": rows, "head": rows})


def same_after_two_steps(model: Any, reference: Any, x: Tensor) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, reference)]
    for _ in range(2):
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
        same(model, reference)


class Recurrent(nn.Module):
    """torch's recurrent modules keep weak references to their weights."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.up, self.inner, self.head = nn.Linear(4, 4), kind(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.up(x))[0])


def recurrent_modules() -> None:
    """A word, whose first call moves the weights; styles for another part, after a call that has left all open."""
    torch.set_default_dtype(torch.float64)
    x = batch(6).view(2, 3, 4)
    for kind, plans in ((nn.LSTM, [{"tp": "fsdp"}]), (nn.GRU, [None, {"up": ColwiseParallel(output_layouts=Replicate())}])):
        torch.manual_seed(0)
        model: Any = Recurrent(kind)
        reference = copy.deepcopy(model)
        for plan in plans:
            fxshard.parallelize_module(model, mesh(), plan, compiler="eager")
        same_after_two_steps(model, reference, x)


def held_before_the_first_call() -> None:
    """What would not follow a parameter that the first call moves is refused, with the parameter's name, and nothing is changed."""
    model, reference = net(), net()
    fxshard.parallelize_module(model, mesh(), {"tp": "fsdp"}, compiler="eager")
    held: list[Any] = [weakref.ref(model[2].bias)] if dist.get_rank() else []
    with pytest.raises(RunError, match=r"parameter 2.bias has to move to another layout, and a weak reference"):
        model(batch())
    held = [model[2].weight.square().sum()]
    with pytest.raises(RunError, match=r"parameter 2.weight has to move to another layout, and a graph of autograd(.|\n)*example_args"):
        model(batch())
    assert all(p.placements == (Replicate(),) for p in model.parameters())
    held.pop().backward()
    model.zero_grad()
    for m in (model, reference):
        m(batch()).square().sum().backward()
    same(model, reference)
    assert model[0].weight.placements == (Shard(0),)


found, test_two_ranks = two_ranks(
    copies,
    averages,
    gradients_in_buckets,
    loading,
    loading_before_the_first_call,
    assigned_before_the_first_call,
    saved,
    given_parameters,
    refused,
    dtypes_and_modes,
    anomalies,
    parametrized,
    parametrizations_removed,
    other_parts,
    other_parts_before_the_first_call,
    tied_weights,
    recurrent_modules,
    held_before_the_first_call,
)
