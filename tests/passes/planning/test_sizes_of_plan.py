"""The lower bound of ``plan.at`` must hold for every plan: compared with random plans, and with all plans of a tiny model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from passes.enumeration import TOY, Enumeration
from torch import Tensor, nn

from fxshard.errors import PlanError, SizesError
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning import sizes_of_plan
from fxshard.passes.planning.constrain import constraints_of
from fxshard.passes.planning.sizes_of_plan import plan_at
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.shapes import dynamic_dims
from fxshard.testing.random_plan import random_graph_plan


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).softmax(1).sum(1) + x.cumsum(1)[:, -1]


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu().sum(0)


def annotated(model: nn.Module, shape: tuple[int, ...], names: dict[int, str], mesh: Mesh, uneven: bool) -> Annotated:
    args = (torch.zeros(shape),)
    dims = tuple(replace(dim, uneven=uneven) for dim in dynamic_dims(model, args, {}, {"x": names}))
    return annotate(trace(model, args, train=False, dynamic=dims), mesh)


@pytest.fixture
def best_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Annotated, ShardingPlan]]:
    """For each call of ``plan_at``: the annotated graph at those sizes, and the best plan for it."""
    seen: list[tuple[Annotated, ShardingPlan]] = []
    real = sizes_of_plan.best_plan

    def best(other: Annotated, *args: Any) -> ShardingPlan:
        seen.append((other, real(other, *args)))
        return seen[-1][1]

    monkeypatch.setattr(sizes_of_plan, "best_plan", best)
    return seen


@pytest.mark.parametrize("uneven", [False, True])
def test_no_random_plan_costs_less_than_the_bound(uneven: bool, best_plans: list[tuple[Annotated, ShardingPlan]]) -> None:
    own = annotated(Mixed(), (8, 4, 8), {0: "batch", 1: "seq"}, Mesh({"a": 4}, TOY), uneven)
    constraints, answered = constraints_of(own.graph, own.mesh), set()
    for plan in [random_graph_plan(own, seed, timed=True) for seed in (None, *range(4))]:
        for batch, seq in ((8, 4), (5, 3), (1, 7), (3, 1), (64, 8)):
            try:
                at = plan_at(plan, own, constraints, "time", None, {"batch": batch, "seq": seq})
            except SizesError:
                continue
            assert best_plans[-1][1].lower_bound <= at.objective * (1 + 1e-9)
            answered.add((batch, seq))
    assert len(answered) == 5


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("batch", [1, 5, 8, 40])
def test_the_bound_is_the_cost_of_the_best_plan(batch: int, uneven: bool, best_plans: list[tuple[Annotated, ShardingPlan]]) -> None:
    own = annotated(Tiny(), (8, 8), {0: "batch"}, Mesh({"a": 4}, TOY), uneven)
    plan = plan_graph(own.graph, own.mesh, Request(cache=False, train=False))
    at = plan_at(plan, own, constraints_of(own.graph, own.mesh), "time", None, {"batch": batch})
    least = Enumeration(best_plans[-1][0], "time").least(float("inf"))
    assert best_plans[-1][1].lower_bound == pytest.approx(least, rel=1e-9) == at.best


def test_a_wrong_bound_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = annotated(Tiny(), (8, 8), {0: "batch"}, Mesh({"a": 4}, TOY), uneven=False)
    plan = plan_graph(own.graph, own.mesh, Request(cache=False, train=False))
    wrong = replace(plan, certificate=replace(plan.certificate, lower_bound=2 * plan.objective))
    monkeypatch.setattr(sizes_of_plan, "best_plan", lambda *_, **__: wrong)
    with pytest.raises(PlanError, match=r"at batch=8 the plan costs .* one is wrong"):
        plan_at(plan, own, constraints_of(own.graph, own.mesh), "time", None, {})
