"""fxshard.parallelize_module with torch's styles, on two ranks: against torch's own parallelize_module and one device, float64."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import fxshard
from fxshard.layout.layouts import Layout
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).view(x.shape[0], -1, 4, 2).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(x.shape[0], -1, 8))


class LocalHeads(Attention):
    """Written for torch's styles: the number of heads is that of the rank."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.view(t.shape[0], t.shape[1], -1, 2).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.wo(y.reshape(y.shape[0], y.shape[1], -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(8), nn.RMSNorm(8), LocalHeads()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def two_layers() -> Decoder:
    return Decoder(2)


LINEAR = {
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}
SEQUENCE = {  # torchtitan's plan of a decoder
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "layers.*.norm?": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
}


def mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def made(kind: Any = Decoder) -> Any:
    torch.manual_seed(0)
    return kind().double()


def tokens() -> Tensor:
    return torch.randint(0, 16, (2, 6), generator=torch.Generator().manual_seed(1))


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def train(model: Any, *args: Any, steps: int = 2, loss: Any = lambda out: out.square().sum()) -> list[Tensor]:
    """The losses of a few steps with an optimiser that is made before the first call."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(*args))
        value.backward()
        optimizer.step()
        losses.append(whole(value).detach())
    return losses


def equal(model: Any, reference: Any) -> None:
    have, want = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(have) == list(want)
    for name in want:
        torch.testing.assert_close(whole(have[name]), whole(want[name]), rtol=1e-9, atol=1e-12, msg=name)


def styled(plan: Any, kind: Any = Decoder, **options: Any) -> Any:
    return fxshard.parallelize_module(made(kind), mesh(), plan, compiler="eager", **options)


def megatron() -> None:
    """All parameters are DTensors at once, those of the styles sharded; at the first call the others move, as the same objects."""
    model, reference = styled(LINEAR, two_layers), made(two_layers)
    assert model.layers[0].up.weight.placements == (Shard(0),) and model.norm.weight.placements == (Replicate(),)
    before = dict(model.named_parameters())
    torch.testing.assert_close(train(model, tokens()), train(reference, tokens()))
    assert all(before[name] is p and isinstance(p, DTensor) for name, p in model.named_parameters())
    assert model.layers[1].down.weight.placements == (Shard(1),)
    equal(model, reference)


def sequence_parallel() -> None:
    model, reference = styled(SEQUENCE, two_layers), made(two_layers)
    torch.testing.assert_close(train(model, tokens()), train(reference, tokens()))
    equal(model, reference)
    (program,) = model.forward.programs
    kinds = [c.kind for c in program.plan.collectives]
    assert kinds.count("reduce_scatter") >= 5, kinds  # the embedding, and two in each of two layers
    theirs = parallel.parallelize_module(made(two_layers), mesh(), SEQUENCE)
    torch.testing.assert_close(whole(model(tokens())), model(tokens()))
    train(theirs, tokens())
    torch.testing.assert_close(theirs(tokens()), model(tokens()))


def shards_of_arguments() -> None:
    """torch's example of sequence parallelism: each rank passes its own rows and gets its own back."""
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}

    def net() -> Any:
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

    model, theirs = styled(plan, net), parallel.parallelize_module(made(net), mesh(), plan)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    xs = [x.clone().requires_grad_() for _ in range(2)]
    have, want = model(xs[0]), theirs(xs[1])
    assert type(have) is Tensor and have.shape == (3, 4)
    torch.testing.assert_close(have, want)
    have.square().sum().backward()
    want.square().sum().backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad)
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), whole(p.grad))
    torch.testing.assert_close(model(x[:2]), theirs(x[:2]))  # another size


def results_as_dtensors() -> None:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}

    def net() -> Any:
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    out = styled(plan, net)(x)
    assert isinstance(out, DTensor) and out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), made(net)(x))
    rows = fxshard.local_batch(torch.cat([x, x]).chunk(2)[dist.get_rank()], mesh(), axis="tp")
    for said in ({"tp": "ddp"}, {"0": "colwise", "2": "rowwise"}):  # no style says a form, and an argument is a DTensor
        out = styled(said, net)(rows)
        assert isinstance(out, DTensor) and out.shape == (6, 4)
        torch.testing.assert_close(out.mean().full_tensor(), made(net)(x).mean())


def prepared_modules() -> None:
    """PrepareModuleInput, Output and InputOutput, with keywords, on a module that computes on what it is given."""

    class Mixer(nn.Module):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return x * 2 if bias is None else x * 2 + bias

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixer, self.other, self.last = nn.Linear(4, 4), Mixer(), Mixer(), Mixer()

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return self.last(self.other(self.mixer(self.first(x), bias=bias)))

    plan = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "mixer": PrepareModuleInput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(0),),
            input_kwarg_layouts={"bias": Replicate()},
            desired_input_kwarg_layouts={"bias": Shard(0)},
        ),
        "other": PrepareModuleInputOutput(
            input_layouts=(Shard(0),),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Replicate(),),
            desired_output_layouts=(Shard(1),),
        ),
        "last": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
    }
    x, bias = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(styled(plan, Net)(x, bias), made(Net)(x, bias))


class ColumnsThenRows(ParallelStyle):
    """A user's style: one parameter by hand, inputs and outputs by DTensor's calls."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def partition(name: str, part: nn.Module, device_mesh: Any) -> None:
            part.register_parameter("weight", nn.Parameter(distribute_tensor(part.weight, device_mesh, [Shard(0)])))

        def enter(part: nn.Module, inputs: Any, device_mesh: Any) -> Any:
            return DTensor.from_local(inputs[0], device_mesh, [Replicate()])

        def leave(part: nn.Module, outputs: Any, device_mesh: Any) -> Any:
            return outputs.redistribute(placements=[Shard(0)]).to_local()

        return distribute_module(module, device_mesh, partition, enter, leave)


def own_styles() -> None:
    def net() -> Any:
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 4))

    model = styled({"0": ColumnsThenRows()}, net)
    assert model[0].weight.placements == (Shard(0),)
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model(x), made(net)(x))
    specs = model.forward.programs[0].plan.specs
    assert any("placed" in name and str(spec.outputs[0]) == "S(0)" for name, spec in specs.items()), list(specs)


def no_plan_is_auto() -> None:
    for plan in (None, "auto", {"tp": "auto"}):
        model, reference = styled(plan), made()
        torch.testing.assert_close(train(model, tokens()), train(reference, tokens()))
    model = styled(None, example_args=(tokens(),))
    assert all(isinstance(p, DTensor) for p in model.parameters())


def part_of_a_mesh() -> None:
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    reference = made()
    want = train(reference, tokens())
    part = fxshard.parallelize_module(made(), both["tp"], LINEAR, compiler="eager")
    torch.testing.assert_close(train(part, tokens()), want)
    every = fxshard.parallelize_module(made(), both, {"dp": "auto", "tp": LINEAR}, compiler="eager")
    torch.testing.assert_close(train(every, tokens()), want)
    assert every.layers[0].up.weight.placements[1] == Shard(0) and every.norm.weight.device_mesh == both
    equal(every, reference)


def words() -> None:
    """One-word plans, beside styles too, which say nothing about the word's axis: plain arguments are whole, each rank takes its rows."""
    reference = made()
    want = train(reference, tokens())
    model = styled(fxshard.FullyShard())
    torch.testing.assert_close(train(model, tokens()), want)
    equal(model, reference)
    (program,) = model.forward.programs
    assert model.layers[0].up.weight.placements == (Shard(0),)
    assert {str(layout) for end, layout in zip(program.inputs, program.input_layouts, strict=True) if end.kind == "input"} == {"S(0)"}
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    mixed = fxshard.parallelize_module(made(), both, {"dp": "fsdp", "tp": LINEAR}, compiler="eager")
    before = dict(mixed.named_parameters())
    torch.testing.assert_close(train(mixed, tokens()), want)
    equal(mixed, reference)
    assert all(before[name] is p and p.placements[0].is_shard() for name, p in mixed.named_parameters() if p.ndim == 2)
    assert mixed.layers[0].up.weight.placements == (Shard(0), Replicate()), "a style says nothing about the other axis, and tp has one rank"
    given = fxshard.parallelize(made(), (tokens(),), mesh(), parallel=fxshard.DataParallel(), compiler="eager")
    torch.testing.assert_close(train(given, tokens()), want)
    assert given.layers[0].up.weight.placements == (Replicate(),)


class Ambient(nn.Module):
    """Shards a part of itself within its definition, under the ambient mesh."""

    def __init__(self, plan: Any = None, **options: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        self.last = nn.Linear(4, 4)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()} if plan is None else plan
        self.net = fxshard.parallelize_module(self.net, None, plan, compiler="eager", **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(x))


def inside_a_model() -> None:
    """Called as it is, the part is parallelized alone; a program of the whole model takes its place."""
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with mesh():
        alone, all_of_it = made(Ambient), made(Ambient)
    want = nn.Sequential(*(m for m in (nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 4)))).double()
    values = [whole(p).detach() for p in alone.parameters()]
    for parameter, value in zip(want.parameters(), values, strict=True):
        parameter.data.copy_(value)
    torch.testing.assert_close(alone(x), want(x))
    assert not isinstance(alone.last.weight, DTensor)
    fxshard.parallelize_module(all_of_it, mesh(), compiler="eager")
    torch.testing.assert_close(all_of_it(x), want(x))
    assert isinstance(all_of_it.last.weight, DTensor)


def what_a_part_was_given() -> None:
    """Names with styles and pins of a part hold in the plan of the whole model, which says them for other parts; a word cannot."""
    x, rows = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), {"last": "rowwise"}

    def shards(model: nn.Module) -> dict[str, str]:
        layouts = {name: str(Layout(p.placements)) for name, p in model.named_parameters() if isinstance(p, DTensor)}
        return {name: layout for name, layout in layouts.items() if layout != "R"}

    def inside(*args: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        with mesh():
            return Ambient(*args, **options).double()

    named, want = {"0": "colwise", "2": "rowwise"}, {"net.0.weight": "S(0)", "net.0.bias": "S(0)", "net.2.weight": "S(1)"}
    whole_model = fxshard.parallelize_module(inside(named), mesh(), rows, compiler="eager")
    torch.testing.assert_close(whole_model(x), inside()(x))
    assert shards(whole_model) == {**want, "last.weight": "S(1)"}
    by_example = fxshard.parallelize(inside(named), (x,), mesh(), parallel=rows, compiler="eager")
    assert shards(by_example) == {**want, "last.weight": "S(1)"}
    pinned = fxshard.parallelize(inside("auto", pins={"0.weight": "S(1)"}), (x,), mesh(), pins={"last.weight": "S(0)"}, compiler="eager")
    assert shards(pinned) == {"net.0.weight": "S(1)", "last.weight": "S(0)"}
    cases = {r"FullyShard\(dim=0\) on tp": (fxshard.FullyShard(), {}), "memory_limit": ("auto", {"memory_limit": "1GB"})}
    for said, (plan, options) in cases.items():
        with pytest.raises(
            fxshard.FxshardError, match=f"net was parallelized with {said}, which the plan of a module around it cannot keep"
        ):
            fxshard.parallelize_module(inside(plan, **options), mesh(), compiler="eager")
    with pytest.raises(fxshard.FxshardError, match="net was given names with styles on tp, and the model FullyShard"):
        fxshard.parallelize_module(inside(named), mesh(), fxshard.FullyShard(), compiler="eager")


def one_call_after_another() -> None:
    """As torchtitan does: the top of the model, then each block, then what is left; an optimiser made in between holds the parameters."""
    model, reference = styled({name: style for name, style in SEQUENCE.items() if "*" not in name}, two_layers), made(two_layers)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (model, reference)]
    before = dict(model.named_parameters())
    block = {name.removeprefix("layers.*."): style for name, style in SEQUENCE.items() if "*" in name}
    late = {name: block.pop(name) for name in ("up", "down")}
    for plan in (block, late):
        for layer in model.layers:
            fxshard.parallelize_module(layer, mesh(), plan, compiler="eager")
    fxshard.parallelize_module(model, mesh(), pins={"layers.1.norm2.weight": "S(0)"}, compiler="eager")
    assert all(before[name] is p for name, p in model.named_parameters())
    for _ in range(2):
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            m(tokens()).square().sum().backward()
            optimizer.step()
    equal(model, reference)
    assert "forward" not in vars(model.layers[0]) and model.layers[1].norm2.weight.placements == (Shard(0),)
    assert model.layers[0].up.weight.placements == (Shard(0),) and model.layers[1].down.weight.placements == (Shard(1),)
    for shape, columns in ((1, 2), (Replicate(), Shard(0))), ((2, 1), (Shard(0), Replicate())):  # a style says nothing about dp
        both, words = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), {"dp": fxshard.FullyShard()}
        model, reference = made(), made()
        first = {name: style for name, style in LINEAR.items() if "attention" in name}
        fxshard.parallelize_module(model, both, {**words, "tp": first}, compiler="eager")
        fxshard.parallelize_module(model, both, {**words, "tp": {"layers.*.up": LINEAR["layers.*.up"]}}, compiler="eager")
        fxshard.parallelize_module(model.layers[0], both, {**words, "tp": {"down": LINEAR["layers.*.down"]}}, compiler="eager")
        torch.testing.assert_close(train(model, tokens()), train(reference, tokens()))
        equal(model, reference)
        assert {model.layers[0].attention.wq.weight.placements, model.layers[0].up.weight.placements} == {columns}
    rows, x = {"1": RowwiseParallel(input_layouts=Replicate())}, torch.ones(2, 4, dtype=torch.float64)
    around = styled({"1": RowwiseParallel()}, lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)))
    part = fxshard.parallelize_module(around[0], mesh(), rows, compiler="eager")
    first, second = ((whole(layer.weight), whole(layer.bias)) for layer in part)
    torch.testing.assert_close(part(x), F.linear(F.linear(x, *first), *second))  # alone, before the model that waits around it
    assert part[1].weight.placements == (Shard(1),)


def sequence_parallel_beside_another_axis() -> None:
    """torchtitan's plan on one of two axes: a styled embedding, and a styled result, whole on the axis that no style names."""
    for dp in ({}, {"dp": fxshard.FullyShard()}, {"dp": fxshard.DataParallel()}):
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model, reference = made(), made()
        fxshard.parallelize_module(model, both, {**dp, "tp": SEQUENCE}, compiler="eager")
        assert type(model(tokens())) is Tensor and model(tokens()).shape == (2, 6, 16)
        torch.testing.assert_close(train(model, tokens()), train(reference, tokens()))
        equal(model, reference)


def a_copy_before_the_first_call() -> None:
    model = styled(LINEAR)
    other, reference = copy.deepcopy(model), made()
    torch.testing.assert_close(train(other, tokens()), train(reference, tokens()))
    torch.testing.assert_close(model(tokens()), made()(tokens()))


def nested_mappings() -> None:
    """Styles in mappings within mappings, which torch takes too, for an axis or without one."""
    inner = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    one: list[Any] = [{"layers.*": inner}, {"layers": {"*": {"": inner}}}]
    for plan, chosen in (*((plan, both["tp"]) for plan in one), ({"tp": {"layers.*": inner}}, both)):
        model, reference = made(), made()
        fxshard.parallelize_module(model, chosen, plan, compiler="eager")
        assert model.layers[0].up.weight.placements[-1] == Shard(0) and model.layers[0].down.weight.placements[-1] == Shard(1)
        torch.testing.assert_close(train(model, tokens()), train(reference, tokens()))
        equal(model, reference)
    with pytest.raises(fxshard.FxshardError, match=r"'layers.\*.up': 3 is not a module's name and a ParallelStyle"):
        styled({"layers.*": {"up": 3}})


def warned_and_refused() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        styled({"layers.*.gate": ColwiseParallel()})
    assert any("could not be resolved" in str(w.message) for w in said)
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(fxshard.FxshardError, match=r"styles are for one axis, and the mesh has dp, tp(.|\n)*'tp'"):
        fxshard.parallelize_module(made(), both, LINEAR)
    with pytest.raises(fxshard.FxshardError, match=r"'fdsp', given for 'dp', is not a word for an axis; did you mean 'fsdp'"):
        fxshard.parallelize_module(made(), both, {"dp": "fdsp", "tp": LINEAR})
    with pytest.raises(fxshard.FxshardError, match="is not a module's name and a ParallelStyle"):
        styled({"layers.*.up": 3})
    with pytest.raises(fxshard.FxshardError, match=r"the mesh has no axis 'dp'(.|\n)*its axes are tp"):
        styled({"dp": fxshard.FullyShard()})
    with pytest.raises(fxshard.FxshardError, match=r"the mesh has no axis 'tpp'; did you mean 'tp'"):
        styled({"tpp": LINEAR})
    up = {"layers.*.up": ColwiseParallel()}
    for plan in ({"tp": up, **up}, {"tp": "auto", **up}, {**up, "tp": fxshard.FullyShard()}, {"tp": "fsdp", "layers.*.up": "colwise"}):
        with pytest.raises(fxshard.FxshardError, match=r"'tp' is an axis of the mesh, and 'layers.\*.up' beside it is none(.|\n)*for all"):
            styled(plan)
    with pytest.raises(fxshard.FxshardError, match=r"'colwse' is not a style(.|\n)*colwise"):
        styled({"layers.*.up": "colwse"})(tokens())
    part = mesh()

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return DTensor.from_local(x.sin(), part, [Shard(0)]).full_tensor()

    with pytest.raises(
        fxshard.FxshardError, match=r"from_local takes a value that is equal on all ranks as this rank's shard(.|\n)*test_styles.py"
    ):
        styled(None, Sum)(torch.ones(4, 4))


found, test_two_ranks = two_ranks(
    megatron,
    sequence_parallel,
    shards_of_arguments,
    results_as_dtensors,
    prepared_modules,
    own_styles,
    no_plan_is_auto,
    part_of_a_mesh,
    words,
    inside_a_model,
    nested_mappings,
    what_a_part_was_given,
    one_call_after_another,
    sequence_parallel_beside_another_axis,
    a_copy_before_the_first_call,
    warned_and_refused,
)
