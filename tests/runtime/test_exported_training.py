"""Exported training programs, from their files: gradients, or whole steps of torch's optimisers, beside one device for three steps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import FxshardError, OptionError, TraceError

MESH = {"dp": 2, "tp": 2}
PINS = {"up.weight": "RS(0)", "down.weight": "RS(1)"}
STEPS = 3


class Regression(nn.Module):
    """Two products, a norm with running statistics, and a loss; one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.norm(self.up(x)).tanh()) - y).square().mean()


def made() -> tuple[Regression, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    return Regression().double(), [(torch.randn(8, 6).double(), torch.randn(8, 3).double()) for _ in range(STEPS)]


OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": functools.partial(torch.optim.SGD, lr=0.1, maximize=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True, eps=1e-4),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.9)),
}


def reference(optimizer: Any) -> tuple[Regression, list[torch.Tensor]]:
    """The model after the steps, and the losses."""
    model, batches = made()
    stepper, losses = optimizer(model.parameters()), []
    for batch in batches:
        loss = model(*batch)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
    return model, losses


def through_a_file(folder: Path, **options: Any) -> Any:
    model, batches = made()
    fxshard.export(model, batches[0], fxshard.Mesh(MESH), pins=PINS, train=True, **options).save(folder / "t.pt2")
    return fxshard.load(folder / "t.pt2")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_the_program(tmp_path: Path, name: str) -> None:
    program = through_a_file(tmp_path, optimizer=OPTIMIZERS[name])
    assert program.collectives
    (_, batches), (want, losses) = made(), reference(OPTIMIZERS[name])
    weights = dict(program.weights)
    for batch, loss in zip(batches, losses, strict=True):
        result = fxshard.simulate(program, batch, weights=weights)
        torch.testing.assert_close(result.outputs, loss, rtol=1e-9, atol=1e-9)
        weights |= result.mutations
    for key, value in want.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-9)
    assert not torch.equal(weights["up.weight"], program.weights["up.weight"]) and "up.bias" not in {o.name for o in program.outputs}


def test_the_state_of_an_optimiser_goes_on(tmp_path: Path) -> None:
    """An object that has made steps: its state is the program's first. A learning rate is a weight of the program."""
    model, batches = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(*batches[0]).backward()
    optimizer.step()
    fxshard.export(model, batches[0], fxshard.Mesh(MESH), train=True, optimizer=optimizer).save(tmp_path / "t.pt2")
    program = fxshard.load(tmp_path / "t.pt2")
    assert program.weights["optimizer.down.bias.step"] == 1
    halved = {"optimizer.groups.0.lr": torch.tensor(0.05, dtype=torch.float64)}
    result = fxshard.simulate(program, batches[1], weights={**program.weights, **halved})
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.zero_grad()
    model(*batches[1]).backward()
    optimizer.step()
    torch.testing.assert_close(result.mutations["down.weight"], model.down.weight.detach(), rtol=1e-9, atol=1e-9)


def test_a_step_at_any_size(tmp_path: Path) -> None:
    """Batches of other sizes than the example's, cut unevenly, from a file, and planned again for another mesh."""
    optimizer, options = OPTIMIZERS["adamw"], {"dynamic_shapes": ({0: "batch"}, {0: "batch"}), "replan": True}
    program = through_a_file(tmp_path, optimizer=optimizer, **options)
    for one in (program, program.replan(fxshard.Mesh({"tp": 3}), pins={"up.weight": "S(0)"}, input_layouts="S(0)")):
        assert one.collectives
        model, weights = made()[0], dict(one.weights)
        stepper = optimizer(model.parameters())
        for rows in (5, 12):
            batch = torch.randn(rows, 6).double(), torch.randn(rows, 3).double()
            loss, result = model(*batch), fxshard.simulate(one, batch, weights=weights)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            torch.testing.assert_close(result.outputs, loss.detach(), rtol=1e-9, atol=1e-9)
            weights |= result.mutations
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-9, atol=1e-9)


def test_the_screen_counts_no_state_as_parameters() -> None:
    model, batches = made()
    held = sum(p.numel() for p in model.parameters())
    cases: list[tuple[Any, str]] = [(torch.optim.AdamW, "a training step with its optimizer"), (None, "forward and backward")]
    for optimizer, purpose in cases:
        program = fxshard.export(model, batches[0], fxshard.Mesh(MESH), train=True, **({"optimizer": optimizer} if optimizer else {}))
        said = fxshard.inspect.summary(program)
        assert f" {held:,} parameters in {len(list(model.parameters()))} tensors, {purpose}, " in said.splitlines()[0]
        assert ("parameters and state" in said) == (optimizer is not None)


def test_gradients_without_an_optimiser(tmp_path: Path) -> None:
    program = through_a_file(tmp_path)
    model, batches = made()
    result = fxshard.simulate(program, batches[0])
    model(*batches[0]).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-9, atol=1e-9)


class Several(Regression):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sum() * self.up.weight.sum(), super().forward(x, y)


REFUSED: list[tuple[dict[str, Any], type[FxshardError], str]] = [
    ({"train": False, "optimizer": torch.optim.SGD}, OptionError, "an optimizer is for a training program"),
    ({"optimizer": torch.optim.Adagrad}, OptionError, "cannot hold the step of Adagrad"),
    ({"optimizer": 3}, OptionError, "cannot make an optimiser of 3"),
    ({"optimizer": torch.optim.AdamW(nn.Linear(1, 1).parameters())}, OptionError, "a parameter that the model does not have"),
    ({"optimizer": functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.5)}, OptionError, "another first step"),
]


@pytest.mark.parametrize(("options", "kind", "what"), REFUSED)
def test_refused(options: dict[str, Any], kind: type[FxshardError], what: str) -> None:
    model, batches = made()
    with pytest.raises(kind, match=what):
        fxshard.export(model, batches[0], fxshard.Mesh(MESH), **{"train": True, **options})


def test_several_losses_are_refused() -> None:
    with pytest.raises(TraceError, match="returns 2 differentiable numbers"):
        fxshard.export(Several().double(), made()[1][0], fxshard.Mesh(MESH), train=True, optimizer=torch.optim.SGD)
