"""plan.explain accepts the names that pins accept, if they mean one value."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import PlanError
from fxshard.plans.sharding_plan import ShardingPlan


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(x, 4).values, x.exp()


class Block(nn.Module):
    """Calls the modules ``twice`` and ``relu`` twice each. There is also a node with the name ``relu``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.pair, self.twice, self.relu = nn.Linear(8, 8), Pair(), nn.Sigmoid(), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.pair(self.up(x))
        return self.relu(self.twice(a)) * self.relu(self.twice(b[:, :4]))


def planned(**options: Any) -> ShardingPlan:
    model = nn.Sequential(Block(), nn.Linear(4, 8), Block())
    return fxshard.plan(model, (torch.ones(4, 8),), fxshard.Mesh({"tp": 2}), cache=False, train=False, **options)


once = lru_cache(planned)


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("0.up", "add"),
        ("2.up", "add_2"),
        ("0.pair[0]", "topk"),
        ("0.pair[1]", "exp"),
        ("0", "mul"),
        ("topk[0]", "topk"),
        ("sigmoid", "sigmoid"),
    ],
)
def test_a_name_means_what_it_means_in_pins(name: str, node: str) -> None:
    explained = once().explain(name, "S(0)")
    assert (explained.name, explained.node) == (name, node)
    assert explained.choices[0].total == pytest.approx(planned(pins={name: "S(0)"}).objective)


def test_a_module_with_several_values_is_passed_over_for_a_node_of_that_name() -> None:
    model, args = Block(), (torch.ones(4, 8),)
    plan = fxshard.plan(model, args, fxshard.Mesh({"tp": 2}), cache=False, train=False)
    assert plan.explain("relu").node == "relu"
    with pytest.raises(PlanError, match="'twice' means 2 values"):
        plan.explain("twice")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("0.pair", "means 2 values; .*name one of 0.pair[0], 0.pair[1]"),
        ("topk", "means 2 values; .*name one of topk[0], topk[1]"),
        ("2.twice", "means 2 values, in 2 calls; .*name one of sigmoid_2, sigmoid_3"),
        ("*.up.weight", "is a glob; .*name one of 0.up.weight, 2.up.weight"),
        ("*.up", "is a glob; .*name one of 0.up, 2.up"),
        ("*", "is a glob; .*name one of 0.up.weight, 0.up.bias, 1.weight, 1.bias, 2.up.weight and 3 more"),
        ("0.pair[2]", "no parameter"),
    ],
)
def test_a_name_that_is_not_one_value_is_refused_with_alternatives(name: str, said: str) -> None:
    what, _, remedy = said.partition(".*")
    with pytest.raises(PlanError) as error:
        once().explain(name)
    assert repr(name) in error.value.what and what in error.value.what and error.value.remedy is not None and remedy in error.value.remedy
