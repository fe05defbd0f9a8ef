"""With dynamic dims a memory limit holds at the largest sizes. For a dim without a max the plan says up to which size it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxshard
from fxshard.errors import ConstraintError, FxshardError, OptionError, PlanError
from fxshard.mesh.hardware import Hardware, Link
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.plans.sharding_plan import ShardingPlan

SLOW = Hardware("slow", {1: 1e9, 2: 1e9, 4: 1e9, 8: 1e9}, 1e10, 0.0, 64, Link(1e9, 0.0), Link(1e9, 0.0))
MESH = fxshard.Mesh({"a": 4}, hardware=SLOW)
UP_TO = {"x": {0: Dim("batch", max=512)}}
OPEN = {"x": {0: "batch"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu().sum(1)


@pytest.mark.parametrize("dims", [{1: "seq"}, {0: "batch", 1: "seq"}, {0: Dim("batch", max=33), 1: Dim("seq", max=64)}])
def test_passes_count_memory_with_a_dynamic_length(dims: dict[int, Any]) -> None:
    model, mesh = Sums().double(), fxshard.Mesh({"tp": 2})
    plan = fxshard.plan(model, (torch.randn(4, 6, 8).double(),), mesh, dynamic_shapes=(dims,), memory_limit="100MB", cache=False)
    for seq in (6, 10):
        x = torch.randn(4, seq, 8).double()
        torch.testing.assert_close(fxshard.simulate(model, (x,), plan).outputs, model(x), rtol=1e-9, atol=1e-9)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plan(limit: float | None, dims: Any = UP_TO, batch: int = 8, model: nn.Module | None = None, **options: Any) -> ShardingPlan:
    args = (torch.zeros(batch, 16),)
    return fxshard.plan(model or Blocks(), args, MESH, dynamic_shapes=dims, memory_limit=limit, cache=False, **options)


def total(plan_: ShardingPlan) -> int:
    return sum(plan_.memory.values())


def test_the_limit_holds_at_the_largest_size() -> None:
    """The plan without a limit fits at the example but not at the largest size. The plan with the limit fits at both."""
    free = plan(None)
    limit = int(0.9 * free.at(batch=512).memory)
    assert total(free) == free.at().memory < limit < free.at(batch=512).memory
    limited = plan(limit)
    moves = [[(r.value, r.source, r.target, r.readers) for r in one.redistributions] for one in (free, limited)]
    assert moves[0] != moves[1]
    assert total(limited) == limited.at(batch=512).memory <= limit and limited.at().within_limit
    assert limited.objective > free.objective and limited.objective == pytest.approx(limited.at().objective)
    assert limited.memory_sizes == {"batch": 512} and ShardingPlan.from_json(limited.to_json()) == limited
    assert "a device at its peak, at batch=512: " in str(limited) and limited.memory_profile().peak == total(limited)


@pytest.mark.parametrize("share", [0.75, 0.9, 1.0])
def test_the_program_fits_at_the_largest_size(share: float) -> None:
    """Counted by the storages of the lowered program, after all passes, at the example and at the largest size."""
    limit, model = int(share * plan(None).at(batch=512).memory), Blocks()
    made = plan(limit, model=model)
    program = fxshard.lower(model, (torch.zeros(8, 16),), made, dynamic_shapes=UP_TO)
    for batch in (8, 512):
        peak = fxshard.program_memory(program_at(program, {"batch": batch})).peak
        assert peak <= 1.01 * limit and (batch == 8 or peak > 0.7 * limit)


def test_the_smallest_limit_is_that_of_a_static_plan() -> None:
    """The smallest limit with a plan equals that of a static plan for the largest size."""
    with pytest.raises(ConstraintError, match=r"nothing fits in memory_limit=20.0 KB .* per device at batch=512") as error:
        plan(20_000, model=Block())
    with pytest.raises(ConstraintError) as static:
        plan(20_000, None, 512, Block())
    assert "smaller sizes (the max of their Dims)" in str(error.value) and "a smaller batch" in str(static.value)
    least = lambda e: str(e.value.remedy).partition("known")[0].partition("no plan")[0]  # noqa: E731
    assert least(error) == least(static) and plan(20_000, OPEN, model=Block()).memory_sizes == {"batch": 8}


def test_holds_up_to_is_the_last_size_within_the_limit() -> None:
    """Compared with ``plan.at`` at single sizes. A dim with a max is not listed, because the limit holds at its max."""
    made = plan(60_000, OPEN)
    last = made.holds_up_to()["batch"]
    assert last is not None and made.at(batch=last).within_limit and not made.at(batch=last + 4).within_limit
    assert all(made.at(batch=size).within_limit for size in range(4, last, 16)) and last > 8
    assert plan(60_000, {"x": {0: Dim("batch", max=16)}}).holds_up_to() == {}


def test_a_max_that_the_mesh_does_not_divide() -> None:
    """Memory is counted at the next size that the mesh divides, where all shards are as long as the longest."""
    assert plan(400_000, {"x": {0: Dim("batch", max=510)}}).memory_sizes == {"batch": 512}
    assert plan(400_000, {"x": {0: Dim("batch", max=16)}}, 16).memory_sizes == {"batch": 16}


class Short(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.shape[0] < 100 else 3)


def test_sizes_that_a_guard_excludes_do_not_count() -> None:
    """From 100 on the model takes another branch. A call of such a size makes a plan of its own."""
    assert plan(400_000, model=Short()).memory_sizes == {"batch": 96}
    assert plan(400_000, batch=128, model=Short()).memory_sizes == {"batch": 512}


def test_the_largest_of_the_example_sizes_counts() -> None:
    made = plan(400_000, OPEN, example_sizes=[(4,), (64,)])
    assert made.memory_sizes == {"batch": 64} and total(made) == made.at(batch=64).memory
    assert plan(None, OPEN, example_sizes=[(4,), (64,)]).memory_sizes == {"batch": 8}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.shape[0]


def test_holds_up_to_needs_a_limit_dynamic_dims_and_the_graph() -> None:
    with pytest.raises(OptionError, match="no memory limit to keep"):
        plan(None).holds_up_to()
    with pytest.raises(OptionError, match="no dynamic dims"):
        plan(400_000, None).holds_up_to()
    with pytest.raises(PlanError, match="does not know the graph"):
        ShardingPlan.from_json(plan(400_000).to_json()).holds_up_to()


def test_memory_that_does_not_grow() -> None:
    """The input has no elements, so the table takes all the memory, at every size."""
    made = fxshard.plan(Table(), (torch.zeros(8, 0),), MESH, dynamic_shapes=OPEN, memory_limit=10**6, train=False, cache=False)
    assert made.holds_up_to() == {"batch": None}


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(128, 16), nn.Linear(16, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x + self.table.weight[: x.shape[0]]).sum()


def test_holds_up_to_stops_at_the_last_size_that_the_model_accepts() -> None:
    found = plan(10**9, OPEN, model=Positions())
    largest = found.holds_up_to()["batch"]
    assert largest == 128
    assert found.at(batch=largest).within_limit
    with pytest.raises(FxshardError):
        found.at(batch=largest + 4)
