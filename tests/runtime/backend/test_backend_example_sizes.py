"""The option ``example_sizes`` of the backend: a plan for several sizes of dims that are dynamic in Dynamo."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import OptionError
from fxshard.passes import pipeline
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.backend import backend

X = torch.ones(4, 6)
SIZES = [({"x_0": 4}, 3), ({"x_0": 64}, 1)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu()


def planned(monkeypatch: pytest.MonkeyPatch, dynamic: bool | None, **options: Any) -> list[tuple[Any, ShardingPlan]]:
    """The graphs and plans of two calls at different lengths."""
    torch._dynamo.reset()
    found: list[tuple[Any, ShardingPlan]] = []

    def plan_graph(graph: Any, *given: Any) -> ShardingPlan:
        found.append((graph, pipeline.plan_graph(graph, *given)))
        return found[-1][1]

    monkeypatch.setattr(backend, "plan_graph", plan_graph)
    model = Net()
    given = {"mesh": fxshard.Mesh({"a": 1}), "compiler": "eager", "cache": False, **options}
    compiled = torch.compile(model, backend="fxshard", options=given, dynamic=dynamic)
    for rows in (4, 10):
        torch.testing.assert_close(compiled(torch.ones(rows, 6)), model(torch.ones(rows, 6)))
    return found


def test_the_objective_is_the_mean_of_those_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    ((_, plain),) = planned(monkeypatch, True)
    ((_, plan),) = planned(monkeypatch, True, example_sizes=SIZES)
    assert [(dict(one.sizes), one.weight) for one in plan.example_sizes] == [({"x_0": 4}, 0.75), ({"x_0": 64}, 0.25)]
    alone = [planned(monkeypatch, True, example_sizes=[sizes])[0][1].objective for sizes, _ in SIZES]
    assert alone[0] == plain.objective < plan.objective == pytest.approx(0.75 * alone[0] + 0.25 * alone[1])


def test_a_static_graph_ignores_example_sizes_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxshard"):
        (_, first), (_, second) = planned(monkeypatch, None, example_sizes=SIZES)
    assert not first.example_sizes and len(second.example_sizes) == 2
    assert caplog.text.count("example_sizes has no effect on a graph of") == 1 and "its sizes are static" in caplog.text


@pytest.mark.parametrize(("sizes", "said"), [([{"rows": 4}], "no dynamic dim 'rows'(.|\n)*x_0"), ([{"x_0": 0}], "x_0 cannot be 0")])
def test_unknown_names_and_impossible_sizes_are_refused(monkeypatch: pytest.MonkeyPatch, sizes: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        planned(monkeypatch, True, example_sizes=sizes)


def test_example_sizes_with_a_given_plan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fxshard.plan(Net(), (X,), fxshard.Mesh({"a": 1}))
    with pytest.raises(OptionError, match="example_sizes"):
        planned(monkeypatch, True, example_sizes=SIZES, plan=plan)
