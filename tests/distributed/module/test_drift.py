"""Changes behind a program's back are noticed, on two ranks: attributes, modes, parameters, generators, weights."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from fxshard.errors import RunError
from fxshard.runtime.module.module import parallelize
from tests.distributed.module.test_parallelize import Net, mesh, same
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Scaled(nn.Module):
    """Reads one attribute, and counts its calls in another that no tensor depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.calls = nn.Linear(6, 2), 2.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def attributes() -> None:
    """Changing an attribute that the forward reads makes another program; changing one that it does not read makes none."""
    torch.set_default_dtype(torch.float64)
    model, x = Scaled(), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    parallelize(model, (x,), mesh(), compiler="eager", pins={"linear.weight": "S(0)"})
    for scale, programs in ((2.0, 1), (5.0, 2), (2.0, 2), (5.0, 2)):
        model.scale = reference.scale = scale
        model.calls += 1
        same(model(x), reference(x))
        assert len(model.forward.programs) == programs


class Late(nn.Module):
    """Drops out only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(1.0)

    def forward(self, x: Tensor, drop: bool = False) -> Tensor:
        return self.drop(self.linear(x)) if drop else self.linear(x)


def modes_of_parts() -> None:
    """``train()`` or ``eval()`` may matter for one call and not for another."""
    torch.set_default_dtype(torch.float64)
    model, x = Late(), torch.randn(4, 6)
    reference = copy.deepcopy(model)
    parallelize(model, (x,), mesh(), compiler="eager")
    for training, drop, programs in ((True, False, 1), (False, False, 1), (False, True, 2), (True, True, 3), (False, True, 3)):
        model.train(training), reference.train(training)
        same(model(x, drop=drop) if drop else model(x), reference(x, drop))
        assert len(model.forward.programs) == programs


def changed_in_place() -> None:
    """A parameter that changes between forward and backward is an error, as on one device."""
    torch.set_default_dtype(torch.float64)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), torch.randn(4, 6)
    parallelize(model, (x,), mesh(), compiler="eager", pins={"*.weight": "R"})
    loss = model(x).square().sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RunError, match="changed in place between forward and backward"):
        loss.backward()


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def generators_apart() -> None:
    """A generator that one rank used alone is noticed: seeds are compared at calls 1, 2, 4, 8, ..."""
    model, x = Noisy(), torch.ones(8, 8)
    torch.manual_seed(0)
    parallelize(model, (x,), mesh(), compiler="eager", train=False)
    with torch.no_grad():
        model(x)
        model(x)
        if dist.get_rank() == 0:
            torch.rand(1)
        with pytest.raises(RunError, match="rng_seed"):
            for _ in range(2):
                model(x)


def other_weights() -> None:
    """The error names a weight whose last element differs between the ranks, and a buffer."""
    for name in ("a.weight", "scale"):
        torch.manual_seed(0)
        model = Net()
        dict(model.state_dict())[name].view(-1)[-1] += dist.get_rank()
        with pytest.raises(RunError, match=f"the weights of {name}"):
            parallelize(model, (torch.randn(5, 6),), mesh(), compiler="eager")
    program = fxshard.export(nn.Linear(6, 2), (torch.randn(4, 6),), mesh())
    with pytest.raises(RunError, match="the weights of weight"):
        program.bind(mesh(), {"weight": torch.full((2, 6), float(dist.get_rank())), "bias": torch.zeros(2)}, compiler="eager")


found, test_two_ranks = two_ranks(attributes, modes_of_parts, changed_in_place, generators_apart, other_weights)
