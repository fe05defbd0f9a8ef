"""What a plan's file holds besides its decisions: read back, left out of the hash, refused where it contradicts them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import FileError
from fxshard.layout.redistribution import steps
from fxshard.plans.plan_data import Certificate, Place, Redistribution
from fxshard.plans.plan_json import dumps
from fxshard.plans.plan_text import view_of
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import MESH, L, by_hand, small_plan


def test_sources_read_back_and_are_not_in_the_hash() -> None:
    plan = dataclasses.replace(
        small_plan(), model="Net", places={"mm": Place("lin"), "output": Place("", True)}, reads={"mm": ("x", "w"), "output": ("mm",)}
    )
    again = ShardingPlan.from_json(plan.to_json())
    assert (again.model, again.places, again.reads) == (plan.model, plan.places, plan.reads)
    assert again.hash == small_plan().hash and again == small_plan()
    assert "collectives" not in json.loads(dumps(plan, sources=False))


def test_a_redistribution_over_two_axes_shares_its_cost() -> None:
    """Its all-gathers have the bytes of the enumeration, and their costs add up, the larger one's being larger."""
    plan = small_plan()
    path = steps(L("S(0)S(1)"), L("RR"), (8, 4), 4, MESH)
    move = Redistribution("w", (8, 4), 4, L("S(0)S(1)"), L("RR"), path, (), 5.0, 2.0)
    both = dataclasses.replace(plan, redistributions=(move,), certificate=Certificate("microseconds", 8.25, 8.25)).collectives
    assert [c.bytes for c in both] == [2 * 4 * 4, 4 * 4 * 4] or [c.bytes for c in both] == [4 * 2 * 4, 8 * 2 * 4]
    assert sum(c.cost for c in both) == pytest.approx(5.0) and sum(c.hidden for c in both) == pytest.approx(2.0)
    assert both[0].cost < both[1].cost


DAMAGE = (
    ("collectives", [], "0 collectives are listed, but the plan has 1"),
    ("modules", [{"module": 3, "nodes": []}], "modules[0].module"),
    ("reads", [{"node": "mm"}], "the field 'of' is missing"),
    ("model", 3, "model"),
)


@pytest.mark.parametrize(("name", "value", "what"), DAMAGE, ids=[name for name, *_ in DAMAGE])
def test_contradictions_are_refused(name: str, value: Any, what: str) -> None:
    data = json.loads(by_hand(small_plan())) | {name: value}
    with pytest.raises(FileError) as caught:
        ShardingPlan.from_json(json.dumps(data), "plan.json")
    assert what in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("bytes", 49), ("cost", 7.0), ("to", "S(0)P"), ("entry", 1), ("axis", "dp")])
def test_a_collective_that_the_plan_does_not_have_is_refused(field: str, value: Any) -> None:
    data = json.loads(by_hand(small_plan()))
    data["collectives"][0][field] = value
    with pytest.raises(FileError, match=re.escape(f"{field} is {value}, but the plan's redistributions")):
        ShardingPlan.from_json(json.dumps(data))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).relu().sum()


def test_a_plan_knows_the_modules_of_its_nodes() -> None:
    plan = fxshard.plan(Net(), (torch.ones(4, 8),), MESH, parallel={"dp": "ddp", "tp": "tp"}, cache=False)
    assert plan.model == "Net" and {place.module for place in plan.places.values()} >= {"lin"}
    assert {place.backward for place in plan.places.values() if place.module == "lin"} == {False, True}
    assert all(len(plan.reads.get(n.name, ())) == len(n.spec.inputs) for n in plan.nodes)
    said = view_of(plan)
    assert sum(said.exposed.values()) + said.compute == pytest.approx(plan.objective)
    assert "lin, backward" in str(plan) and str(ShardingPlan.from_json(plan.to_json())) == str(plan)
