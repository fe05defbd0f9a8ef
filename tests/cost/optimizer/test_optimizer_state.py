"""``Optimizer.of`` accepts what users pass, and counts the state that torch's optimizer has after a step."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
import torch

import fxshard
from fxshard.cost.optimizer.optimizer_state import OPTIMIZERS, Optimizer
from fxshard.errors import OptionError

CLASSES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Muon")
OPTIONS = ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"centered": True, "momentum": 0.9})


def kept(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> int:
    """How many state tensors of the weight's size the optimizer has after a step."""
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return sum(isinstance(one, torch.Tensor) and one.shape == weight.shape for one in optimizer.state[weight].values())


def taken(name: str, options: dict[str, Any]) -> bool:
    """Whether the class accepts these options."""
    return options.keys() <= inspect.signature(getattr(torch.optim, name)).parameters.keys()


@pytest.mark.parametrize(("name", "options"), [(n, o) for n in CLASSES for o in OPTIONS if taken(n, o)], ids=str)
def test_an_optimizer_and_its_class(name: str, options: dict[str, Any]) -> None:
    weight, made = torch.nn.Parameter(torch.zeros(4, 4)), getattr(torch.optim, name)
    optimizer = made([weight], lr=0.1, **options)
    found, count = Optimizer.of(optimizer), kept(optimizer, weight)
    assert OPTIMIZERS[found.kind] == count == OPTIMIZERS[Optimizer.of(functools.partial(made, **options)).kind]
    assert Optimizer.of(found.kind.upper()) == found
    if not options:
        assert Optimizer.of(made) == Optimizer.of(name) == found


def test_the_parameter_group_with_most_state_counts() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "momentum": 0.5}]
    assert Optimizer.of(torch.optim.SGD(groups, lr=0.1)).kind == "sgd_momentum"


class Mine(torch.optim.Adam):
    """A subclass, whose state is unknown."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.optim.LBFGS, "'LBFGS'"),
        (torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(2, 2))]), "'Adafactor'"),
        (Mine([torch.nn.Parameter(torch.zeros(2))]), "'Mine'"),
        ("adamm", "'adamm'; did you mean 'adam'"),
        (torch.nn.Linear(2, 2), "'Linear'"),
        ("LBFGS", "'LBFGS'"),
        (7, "'int'"),
    ],
)
def test_unknown_optimizers_are_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=f"unknown optimizer {said}") as caught:
        Optimizer.of(given)
    assert "sgd_momentum" in str(caught.value.remedy) and "adamw" in str(caught.value.remedy) and len(str(caught.value)) < 500
    counts = re.findall(r"(\d): ([\w, ]+)", str(caught.value.remedy))
    assert {kind: int(count) for count, kinds in counts for kind in kinds.split(", ")} == OPTIMIZERS
    assert "fxshard.Optimizer(name, state_dtype=...)" in str(caught.value.remedy)


def test_plan_accepts_optimizers_and_sizes_with_units() -> None:
    model, x = torch.nn.Linear(8, 8, bias=False), torch.zeros(4, 8)
    held = {}
    for one in (torch.optim.AdamW, "adam", torch.optim.SGD(model.parameters(), lr=0.1), "none"):
        plan = fxshard.plan(model, (x,), fxshard.Mesh({"dp": 2}), optimizer=one, memory_limit="1MB", pins={"weight": "R"}, cache=False)
        held[str(one)[:12]] = plan.memory.get("optimizer", 0)
        assert plan.memory_limit == 10**6
    weight = 8 * 8 * 4
    assert list(held.values()) == [2 * weight, 2 * weight, 0, 0]
    with pytest.raises(OptionError, match="cannot read 'lots' as a number of bytes"):
        fxshard.plan(model, (x,), fxshard.Mesh({"dp": 2}), memory_limit="lots", cache=False)
    assert fxshard.Communication("dp", at_most="1GB").at_most == 10**9
