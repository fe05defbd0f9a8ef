"""Stages run one after another compute what the model computes, with its parameters under their names."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard.errors import PlanError, TraceError
from fxshard.pipelines.split import StageModule, layers_of, split, split_layers


class Block(nn.Module):
    def __init__(self, features: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(features), nn.Linear(features, 9), nn.Linear(9, features)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor, first: Tensor) -> Tensor:
        y = self.dropout(F.gelu(self.up(self.norm(x) + angles)))
        return (x + self.down(y)).masked_fill(mask, 0) + first


class Net(nn.Module):
    """Layers that share a table (from a buffer), a mask (from an argument) and a skip connection with a gradient."""

    angles: Tensor

    def __init__(self, layers: int = 4, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(11, 6), nn.ModuleList(Block(**options) for _ in range(layers))
        self.head = nn.Linear(6, 11, bias=False)
        self.register_buffer("angles", torch.arange(6.0))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, keep: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        first = x = self.embedding(tokens)
        mask = ~keep[..., None]
        for layer in self.layers:
            x = layer(x, self.angles.sin(), mask, first)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), first


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(0, 11, (3, 5)), torch.rand(3, 5) > 0.3, torch.randint(0, 11, (3, 5))


def run(stages: tuple[StageModule, ...], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for stage in stages:
        found = stage.module(*args)
        args = found if isinstance(found, tuple) else (found,)
    return args


@pytest.mark.parametrize("before", [["layers.2"], ["layers.1", "layers.3"], ["layers.1", "layers.2", "layers.3"]])
def test_a_chain_of_stages_computes_what_the_model_does(before: list[str]) -> None:
    model, args = Net().double(), arguments()
    want = model(*args)
    want[0].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    stages = split(model, args, {}, before)
    loss, first = run(stages, args)
    loss.backward()
    assert torch.equal(loss, want[0]) and torch.equal(first, want[1])
    held = [dict(stage.module.named_parameters()) for stage in stages]
    assert [name for one in held for name in one] == [name for name, _ in model.named_parameters()]
    assert all(p is model.get_parameter(name) for one in held for name, p in one.items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradients[name], rtol=1e-12), name


class Repeated(nn.Module):
    """The layers of a group of ``together`` run one after the other, then once more, before those of the next group."""

    together = 1

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(11, 6), nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embedding(tokens)
        angles, mask = x.new_zeros(6), torch.zeros((), dtype=torch.bool)
        for start in range(0, len(self.layers), self.together):
            for _ in range(2):
                for layer in self.layers[start : start + self.together]:
                    x = layer(x, angles, mask, first)
        return self.head(x)


class AllTwice(Repeated):
    together = 4


def test_calls_of_a_layer_within_a_stage_share_its_parameters() -> None:
    model, (tokens, _, _) = Repeated().double(), arguments()
    want = model(tokens)
    want.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    stages = split(model, (tokens,), {}, ["layers.2"])
    held = [dict(stage.module.named_parameters(remove_duplicate=False)) for stage in stages]
    assert [name for one in held for name in one] == [name for name, _ in model.named_parameters()]
    assert all(p is model.get_parameter(name) for one in held for name, p in one.items())
    (found,) = run(stages, (tokens,))
    found.square().sum().backward()
    assert torch.equal(found, want)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradients[name], rtol=1e-12), name


def test_calls_of_a_layer_in_two_stages_are_refused() -> None:
    tokens = arguments()[0]
    with pytest.raises(
        PlanError, match=r"share a parameter, layers.0.norm.weight, read with the first layer and with layers.2\n.*call each"
    ):
        split(AllTwice(), (tokens,), {}, ["layers.2"])
    with pytest.raises(PlanError, match=r"layers.0.norm.weight, read with the first layer and with layers.3\n"):
        split(AllTwice(), (tokens,), {}, ["layers.3", "layers.1"])


def test_buffers_that_are_not_saved_are_not_saved_by_stages() -> None:
    model = Net()
    model.register_buffer("angles", model.angles, persistent=False)
    stages = split(model, arguments(), {}, ["layers.1", "layers.3"])
    assert all("angles" in dict(stage.module.named_buffers()) for stage in stages)
    assert sorted(name for stage in stages for name in stage.module.state_dict()) == sorted(model.state_dict())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Repeated()

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        logits = self.inner(tokens)
        return {"logits": logits, "losses": (logits.mean(), logits.logsumexp(-1))}


def test_a_dict_of_results_becomes_a_tuple_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = Named().double(), arguments()[0]
    want = model(tokens)
    with caplog.at_level(logging.WARNING, "fxshard"):
        stages = split(model, (tokens,), {}, ["inner.layers.2"])
    found = run(stages, (tokens,))
    assert all(torch.equal(x, y) for x, y in zip(found, (want["logits"], *want["losses"]), strict=True))
    assert "the loss function and the last stage's caller get a tuple, in this order: logits, losses.0, losses.1" in caplog.text


def test_values_pass_through_and_constants_are_computed_in_each_stage() -> None:
    stages = split(Net(), arguments(), {}, ["layers.1", "layers.3"])
    assert [[(v.shape, v.trains) for v in stage.inputs] for stage in stages[1:]] == 2 * [
        [((3, 5, 6), True), ((3, 5, 6), True), ((3, 5), False), ((3, 5, 1), False)]
    ]
    assert all("angles" in dict(stage.module.named_buffers()) for stage in stages)
    assert [v.name for v in stages[0].inputs] == ["tokens", "keep", "targets"]


def test_keyword_arguments_keep_their_names() -> None:
    model, (tokens, keep, targets) = Net(), arguments()
    stages = split(model, (tokens,), {"keep": keep, "targets": targets}, ["layers.2"])
    between = stages[0].module(tokens, targets=targets, keep=keep)
    assert torch.equal(stages[1].module(*between)[0], model(tokens, keep, targets)[0])


def test_argument_names_do_not_clash_with_those_of_nodes() -> None:
    class AnyArguments(Net):
        def forward(self, *args: Tensor) -> Any:  # torch names them args_0, args_1, ...
            return super().forward(*args)

    model, args = AnyArguments(), arguments()
    assert torch.equal(run(split(model, args, {}, ["layers.2"]), args)[0], model(*args)[0])


def test_layers_are_those_of_the_outermost_lists() -> None:
    nested = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "b": nn.Linear(2, 2)})
    assert layers_of(nested) == ("a", "b")
    names, stages = split_layers(nn.Sequential(nn.Linear(6, 6), nn.Identity(), nn.ReLU(), nn.Linear(6, 6)), (torch.rand(2, 6),), {})
    assert names == ("0", "2", "3") and len(stages) == 3  # an identity computes nothing


def test_what_cannot_be_split_is_refused_by_name() -> None:
    args = arguments()
    with pytest.raises(PlanError, match=r"does not call 'layers.9'; did you mean 'layers"):
        split(Net(), args, {}, ["layers.9"])
    with pytest.raises(PlanError, match=r"layers.0.dropout draws random numbers"):
        split(Net(dropout=0.1), args, {}, ["layers.1"])
    split(Net(dropout=0.1).eval(), args, {}, ["layers.1"])

    class Normalising(Net):
        def forward(self, tokens: Tensor, keep: Tensor, targets: Tensor) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(F.batch_norm(x.mT, None, None, training=True).mT, self.angles, ~keep[..., None], x)
            return x

    with pytest.raises(PlanError, match=r"the model would normalise each microbatch by itself \(aten.batch_norm"):
        split(Normalising().eval(), args, {}, ["layers.1"])

    class Counting(Net):
        def forward(self, *args: Tensor) -> Any:
            self.angles.add_(1)
            return super().forward(*args)

    with pytest.raises(PlanError, match=r"the model writes 'angles'"):
        split(Counting(), args, {}, ["layers.1"])

    class Branching(Net):
        def forward(self, tokens: Tensor, *others: Tensor) -> Any:
            return super().forward(tokens if tokens.sum() > 0 else tokens + 1, *others)

    with pytest.raises(TraceError, match="cannot be split into stages"):
        split(Branching(), args, {}, ["layers.1"])
