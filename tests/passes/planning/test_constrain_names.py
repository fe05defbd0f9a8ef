"""Names in constraints: a module stands for what it returns, an index for one result; and the order in which meanings are tried."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from passes.constrained import MESH, PAIR, L
from torch import nn
from torch.distributed.tensor import Shard

from fxshard import Equal, Pin
from fxshard.errors import ConstraintError, LayoutError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan


class Pair(nn.Module):
    """Returns two tensors, of which the second is not always read."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.relu(x).relu(), x.exp()


class Block(nn.Module):
    """``relu`` is a module that is called twice, and also the name of a node."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.pair, self.relu, self.same = Pair(), nn.Linear(8, 8, bias=False), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(self.same(x))
        a, b = self.pair(x)
        c, _ = self.pair(a)
        return self.relu(self.relu(a + b) + c)


@lru_cache
def graph() -> PlanningGraph:
    return trace(nn.ModuleDict({"layers": nn.Sequential(Block(), Block())}).layers, (torch.ones(4, 6, 8),))


def planned(**request: Any) -> ShardingPlan:
    return plan_graph(graph(), MESH, Request(**request))


def given(plan: ShardingPlan, module: str) -> list[list[str | None]]:
    """Layouts of the results of each call of a module."""
    by_name = graph().by_name
    return [[None if n is None else str(plan.specs[by_name[n].name].outputs[0]) for n in call] for call in graph().returned[module]]


@pytest.mark.parametrize("layout", ["S(1)R", "S(1)*", {"dp": Shard(1)}], ids=str)
def test_a_module_stands_for_its_result(layout: Any) -> None:
    """By a glob in ``pins``, and by name in ``constraints``. Axes that the layout leaves out stay free."""
    for plan in (planned(pins={"*.mlp": layout}), planned(constraints=[Pin("0.mlp", layout), Pin("1.mlp", layout)])):
        for name in ("0.mlp", "1.mlp"):
            (((found,),),) = [given(plan, name)]
            assert found.startswith("S(1)") and (layout != "S(1)R" or found == "S(1)R")


def test_all_calls_of_a_module() -> None:
    assert given(planned(pins={"0.relu": "RS(2)"}), "0.relu") == [["RS(2)"], ["RS(2)"]]


def test_a_module_that_returns_its_input_stands_for_the_input() -> None:
    plan = planned(pins={"0.same": "S(1)S(2)"})
    assert plan.layout_of("args[0]") == L("S(1)S(2)")


def test_several_results_of_a_module() -> None:
    """Each gets a layout, or one of them by its index. Nothing reads the second result of the second call, so it has no layout."""
    with pytest.raises(LayoutError, match=r"(?s)the call of 0.pair has 2 results.*\('RR', None\)"):
        planned(pins={"0.pair": "RR"})
    plan = planned(pins={"0.pair": ("S(0)S(1)", None)})
    assert [call[0] for call in given(plan, "0.pair")] == ["S(0)S(1)"] * 2
    plan = planned(constraints=[Pin("0.pair[0]", "S(1)S(0)")])
    assert [call[0] for call in given(plan, "0.pair")] == ["S(1)S(0)"] * 2
    with pytest.raises(LayoutError, match=r"result 1 of the call of 0.pair is not a tensor, or nothing reads it"):
        planned(pins={"0.pair[1]": "RR"})
    with pytest.raises(ConstraintError, match=r"(?s)the call of 0.pair has 2 results.*Equal\('0.pair', '1.pair'\).*'0.pair\[0\]'"):
        planned(constraints=[Equal("0.pair", "1.pair")])


def test_the_order_of_meanings() -> None:
    """An exact name means an input, else a module, else a node. A glob likewise means names of one kind only."""
    nodes = set(graph().by_name)
    assert "relu" in nodes and "add" in nodes
    plan = planned(pins={"relu": "S(0)S(1)"})
    assert plan.layout_of("relu") == L("S(0)S(1)")
    plan = planned(pins={"*.relu": "RS(1)"})  # modules 0.relu, 0.pair.relu, ..., and no node
    assert given(plan, "0.relu") == given(plan, "1.pair.relu") == [["RS(1)"]] * 2
    plan = planned(pins={"0.mlp.*": "S(0)*"})  # parameters, not the modules inside
    assert {str(v)[:4] for k, v in plan.parameter_layouts().items() if k.startswith("0.mlp.")} == {"S(0)"}


def test_names_without_a_meaning() -> None:
    for request in ({"pins": {"0.mpl": "RR"}}, {"constraints": [Pin("0.mpl", "RR")]}, {"constraints": [Equal("0.mlp", "0.mpl")]}):
        with pytest.raises(ConstraintError) as caught:
            planned(**request)
        assert re.search(r"'0.mpl' matches no parameter, buffer, input, output, module or node; did you mean '0.mlp'", caught.value.what)
        assert caught.value.where and "name one of" in str(caught.value.remedy)
    with pytest.raises(ConstraintError, match=r"only args_0 is named to be equal"):
        plan_graph(graph(), PAIR, Request(constraints=[Equal("args[0]", "0.same")]))
