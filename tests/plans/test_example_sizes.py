"""A plan for several example sizes minimises the mean over them and beats the plans for single sizes; invalid sizes are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import fxshard
from examples.llama import Llama
from fxshard.cli.main import main
from fxshard.errors import FileError, OptionError, SizesError
from fxshard.mesh.hardware import Hardware, Link
from fxshard.plans.constraints import Communication
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import by_hand

SLOW = Hardware("slow", {1: 1e9, 2: 1e9, 4: 1e9, 8: 1e9}, 1e10, 0.0, 64, Link(1e9, 0.0), Link(1e9, 0.0))
MESH = fxshard.Mesh({"a": 4}, hardware=SLOW)
BATCH = {"x": {0: Dim("batch", max=512)}}


class Funnel(nn.Module):
    """Products of different sizes: the best layout of each changes at another batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((16, 64), (64, 16), (16, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def plan(sizes: Any, **options: Any) -> ShardingPlan:
    given = {"cache": False, "dynamic_shapes": BATCH, **options}
    return fxshard.plan(Funnel(), (torch.zeros(16, 16),), MESH, example_sizes=sizes, **given)


def mean_at(plan_: ShardingPlan, weights: dict[int, float]) -> float:
    total = sum(weights.values())
    return sum(weight / total * plan_.at(batch=size).objective for size, weight in weights.items())


def test_a_plan_for_two_sizes_beats_the_plans_for_one() -> None:
    weights = {4: 10, 512: 1}
    few, many, both = plan([(4,)]), plan([(512,)]), plan([((size,), weight) for size, weight in weights.items()])
    assert both.specs not in (few.specs, many.specs)
    least = min(mean_at(few, weights), mean_at(many, weights))
    assert both.objective == pytest.approx(mean_at(both, weights)) and both.objective < 0.99 * least
    assert both.gap == 0 and few.at(batch=4).regret == 0 and many.at(batch=512).regret == 0
    assert 0 < both.at(batch=4).regret < many.at(batch=4).regret and 0 < both.at(batch=512).regret < few.at(batch=512).regret


@pytest.mark.parametrize("overlap", [0.0, 0.8])
@pytest.mark.parametrize("objective", ["time", "communication"])
@pytest.mark.parametrize("limit", [None, "205KB"])
def test_the_objective_is_the_mean_over_the_sizes(overlap: float, objective: str, limit: str | None) -> None:
    """This holds even if compute hides gathers of weights, or a memory limit repeats them in the backward."""
    mesh = fxshard.Mesh({"a": 4}, hardware=replace(SLOW, overlap=overlap))
    options: dict[str, Any] = {"dynamic_shapes": BATCH, "objective": objective, "memory_limit": limit, "cache": False}
    sizes = [((4,), 3), ({"batch": 64}, 1), ({}, 2)]
    pins = {"layers.*.weight": "S(0)", "args[0]": "S(0)"}
    made = fxshard.plan(Funnel(), (torch.zeros(16, 16),), mesh, example_sizes=sizes, pins=pins, **options)
    at = [made.at(batch=4), made.at(batch=64), made.at()]
    assert made.objective == pytest.approx((3 * at[0].objective + at[1].objective + 2 * at[2].objective) / 6, rel=1e-9)
    assert all(one.objective >= one.lower_bound * (1 - 1e-9) for one in at)
    assert bool(made.hidden) == (overlap > 0 and objective == "time") and made.collectives
    assert ShardingPlan.from_json(made.to_json()) == made


def test_one_size_gives_the_plan_for_that_size() -> None:
    """The example does not matter. A size that a mapping leaves out is that of the example."""
    assert plan([(64,)]).objective == pytest.approx(fxshard.plan(Funnel(), (torch.zeros(64, 16),), MESH, cache=False).objective)
    assert plan([{}]).objective == plan(None).objective


def test_the_sizes_are_printed_and_saved() -> None:
    made = plan([((4,), 3), ((512,), 1)])
    assert "priced     the mean of 0.75 at batch=4 and 0.25 at batch=512" in str(made).splitlines()
    assert "priced" not in str(plan(None)) and "priced     at batch=64" in str(plan([(64,)])).splitlines()
    with pytest.raises(FileError, match="weights do not add up to 1"):
        ShardingPlan.from_json(by_hand(made).replace('"weight": 0.75', '"weight": 0.5'))
    other = made.explain("layers.1.weight", "R").choices[0]
    assert other.total is not None and other.total >= made.objective * (1 - 1e-9)


def test_the_cache_tells_sizes_apart(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_CACHE", "1")
    monkeypatch.setenv("FXSHARD_CACHE_DIR", str(tmp_path))
    made = [plan(sizes, cache=True) for sizes in ([(4,)], [(512,)], [((512,), 2)])]
    assert [one.origin is not None and one.origin.cached is not None for one in made] == [False, False, True]
    assert made[2].objective == made[1].objective == made[2].at(batch=512).objective


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([8, 64], "cannot read 8 as sizes"),
        ([(8, 4)], r"the weight of|has 2 sizes, there are 1"),
        ([{"bach": 4}], "no dynamic dim 'bach'; did you mean 'batch'"),
        ([(0,)], "batch cannot be 0"),
        ([(1024,)], "batch .* is 1024, it must be from 1 to 512"),
        ([((4,), 1), (8,)], "some of the sizes have a weight"),
        ([((4,), -1)], r"the weight of \(4,\) is -1"),
        ([(4,), {"batch": 4}], "batch=4 is given twice"),
        ({"batch": 4}, "cannot read example_sizes, a dict"),
        ([], "cannot read example_sizes"),
    ],
)
def test_invalid_sizes_are_refused(sizes: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        plan(sizes)


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(OptionError, match="dynamic dims, and there are none"):
        plan([(4,)], dynamic_shapes=None)
    with pytest.raises(OptionError, match="counts bytes at one size"):
        plan([(4,), (8,)], constraints=[Communication("a", at_most=10**9)])


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x


def test_a_size_that_takes_another_branch_is_refused() -> None:
    with pytest.raises(SizesError, match=r"a plan for the example is not valid for batch=2: .* batch > 4"):
        fxshard.plan(Branches(), (torch.zeros(8, 16),), MESH, dynamic_shapes={"x": {0: "batch"}}, example_sizes=[(8,), (2,)], cache=False)


@pytest.mark.parametrize("train", [False, True])
def test_prefill_and_decode(train: bool) -> None:
    """A length of 1 is a size like any other."""
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    args: tuple[torch.Tensor, ...] = (tokens, tokens) if train else (tokens,)
    given: dict[str, Any] = {"dynamic_shapes": ({0: "batch", 1: "seq"},) * len(args), "example_sizes": [(8, 64), (64, 1)], "cache": False}
    made = fxshard.plan(Llama.small(layers=1), args, fxshard.Mesh({"a": 2}), train=train, **given)
    assert made.objective == pytest.approx((made.at(batch=8, seq=64).objective + made.at(batch=64, seq=1).objective) / 2)


MODEL = """
import torch

def rows():
    return torch.nn.Linear(16, 8), (torch.ones(4, 16),)
"""


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    given = [f"{tmp_path}/model.py:rows", "--mesh", "a=2", "--dynamic", "args[0]:0=batch", "--example-sizes"]
    assert main(["plan", *given, "batch=4*3; batch=64*1", "--at", "batch=64"]) == 0
    said = capsys.readouterr().out
    assert "the mean of 0.75 at batch=4 and 0.25 at batch=64" in said and "at batch=64: " in said
    assert main(["export", *given, "batch=4; batch=64", "-o", str(tmp_path / "m.pt2")]) == 0
    plan_ = fxshard.load(tmp_path / "m.pt2").plan
    assert [(dict(one.sizes), one.weight) for one in plan_.example_sizes] == [({"batch": 4}, 0.5), ({"batch": 64}, 0.5)]
    assert main(["plan", *given, "batch=4*x"]) != 0
    assert "cannot read the weight in 'batch=4*x'" in capsys.readouterr().err
    assert main(["plan", *given, "bach=4"]) != 0
    assert "no dynamic dim 'bach'; did you mean 'batch'" in capsys.readouterr().err
