"""plan.at: the cost of a plan with dynamic dims at other sizes, compared with plans made for those sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxshard
from fxshard.errors import OptionError, PlanError, SizesError
from fxshard.mesh.hardware import Hardware, Link
from fxshard.plans.sharding_plan import ShardingPlan

SLOW = Hardware("slow", {1: 1e9, 2: 1e9, 4: 1e9, 8: 1e9}, 1e10, 0.0, 64, Link(1e9, 0.0), Link(1e9, 0.0))
DIMS = {"x": {0: Dim("batch", max=512)}}


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def plan(batch: int, **options: object) -> fxshard.ShardingPlan:
    mesh = fxshard.Mesh({"a": 4}, hardware=SLOW)
    return fxshard.plan(Perceptron(), (torch.zeros(batch, 16),), mesh, cache=False, **options)  # type: ignore[arg-type]


def test_at_the_example_the_figures_are_those_of_the_plan() -> None:
    made = plan(8, dynamic_shapes=DIMS)
    at = made.at()
    assert (at.objective, at.lower_bound, at.regret) == (made.objective, made.lower_bound, 0.0)
    assert at.memory == sum(made.memory.values())


@pytest.mark.parametrize("batch", [4, 64, 256, 512])
def test_the_best_cost_is_that_of_a_plan_made_for_the_size(batch: int) -> None:
    made, there = plan(8, dynamic_shapes=DIMS), plan(batch)
    at = made.at(batch=batch)
    assert at.best == pytest.approx(there.objective) and at.lower_bound == pytest.approx(there.lower_bound)
    assert at.objective >= at.best * (1 - 1e-9)
    assert at.regret == pytest.approx(at.objective / there.lower_bound - 1)


def test_small_and_large_batches_need_different_plans() -> None:
    """Few rows are best with sharded weights, many rows with a sharded batch."""
    assert plan(4, dynamic_shapes=DIMS).at(batch=512).regret > 0.02


def test_memory_is_counted_at_the_size() -> None:
    made = plan(8, dynamic_shapes={"x": {0: "batch"}}, memory_limit=40_000)
    assert made.at().within_limit
    assert not made.at(batch=512).within_limit and "more than memory_limit" in str(made.at(batch=512))


def test_invalid_questions_are_refused() -> None:
    made = plan(8, dynamic_shapes=DIMS)
    with pytest.raises(OptionError, match="no dynamic dim 'bach'; did you mean 'batch'"):
        made.at(bach=4)
    with pytest.raises(OptionError, match=r"batch .* is 1024, it must be from 1 to 512"):
        made.at(batch=1024)
    with pytest.raises(OptionError, match="cannot be 0"):
        made.at(batch=0)
    with pytest.raises(OptionError, match="has no dynamic dims"):
        plan(8).at(batch=4)
    with pytest.raises(PlanError, match="does not know the graph"):
        ShardingPlan.from_json(made.to_json(), "a plan").at(batch=4)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x


def test_a_size_that_takes_another_branch_is_refused() -> None:
    mesh = fxshard.Mesh({"a": 2}, hardware=SLOW)
    made = fxshard.plan(Branches(), (torch.zeros(8, 16),), mesh, cache=False, dynamic_shapes={"x": {0: "batch"}})
    with pytest.raises(SizesError, match="takes for granted that batch > 4"):
        made.at(batch=2)


@pytest.mark.parametrize("cut", ["S(0)", "R"])
def test_a_plan_is_simulated_at_sizes_that_the_mesh_does_not_divide(cut: str) -> None:
    torch.manual_seed(0)
    model, mesh = Perceptron().double(), fxshard.Mesh({"a": 4}, hardware=SLOW)
    made = fxshard.plan(model, (torch.zeros(8, 16).double(),), mesh, cache=False, dynamic_shapes=DIMS, input_layouts=cut)
    for rows in (8, 7, 3, 1):
        x = torch.randn(rows, 16, dtype=torch.float64)
        found = fxshard.simulate(model, (x,), made)
        torch.testing.assert_close(found.outputs, model(x), rtol=1e-9, atol=1e-9)
        grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            torch.testing.assert_close(found.grads[name], grad, rtol=1e-9, atol=1e-9)
