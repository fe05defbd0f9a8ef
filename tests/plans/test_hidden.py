"""The communication that a plan assumes hidden behind compute: in its file, in its text and in a diff."""

from __future__ import annotations

import dataclasses
import json

import pytest

import fxshard
from fxshard import inspect
from fxshard.errors import FileError
from fxshard.plans.plan_data import Certificate, PlanEnd
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import by_hand, small_plan


def hiding(hidden: float) -> ShardingPlan:
    """The small plan with ``hidden`` of the 7.5 microseconds of its all-reduce hidden."""
    plan = small_plan()
    (move,) = plan.redistributions
    move = dataclasses.replace(move, cost=7.5 - hidden, hidden=hidden)
    gradient = (PlanEnd("gradient", "lin.weight", "mm"),)
    return dataclasses.replace(
        plan, outputs=gradient, redistributions=(move,), certificate=Certificate("microseconds", 10.75 - hidden, 10.75 - hidden)
    )


def test_hidden_time_in_the_file() -> None:
    plan = hiding(6.0)
    assert '"cost": 1.5, "hidden": 6.0}' in plan.to_json() and '"hidden"' not in small_plan().to_json()
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan and again.hidden == {"reductions": 6.0}
    assert ShardingPlan.from_json(small_plan().to_json()).hidden == {}
    assert inspect.to_json(plan)["hidden"] == {"reductions": 6.0}


@pytest.mark.parametrize(("hidden", "unit"), [(6.5, "microseconds"), (1.0, "bytes")])
def test_more_than_the_hardware_can_hide_is_refused(hidden: float, unit: str) -> None:
    """An h100 hides at most 0.84 of 7.5 microseconds, which is 6.3. Bytes are never hidden."""
    data = json.loads(by_hand(hiding(hidden)))
    if unit == "bytes":
        data["certificate"]["unit"], data["nodes"][2]["compute"] = unit, 0.0
        data["redistributions"][0]["cost"] = data["certificate"]["objective"] = data["certificate"]["lower_bound"] = 48.0
    with pytest.raises(FileError, match=rf"{hidden} us are hidden, but at most") as caught:
        ShardingPlan.from_json(json.dumps(data))
    assert "redistributions[0]" in str(caught.value)


def test_only_parameters_and_their_gradients_are_hidden() -> None:
    """An output is waited for, and so is a value that an operator reads. A view or cast of a parameter or gradient may be hidden."""
    data = json.loads(by_hand(hiding(6.0)))
    data["outputs"][0]["kind"] = "output"
    with pytest.raises(FileError, match="us are hidden, but 'mm' is neither a parameter that is gathered nor a gradient") as caught:
        ShardingPlan.from_json(json.dumps(data))
    assert "redistributions[0]" in str(caught.value)
    data["nodes"][2]["op"] = "aten.transpose.int"
    assert ShardingPlan.from_json(json.dumps(data)).hidden
    data["redistributions"][0]["value"] = "x"
    with pytest.raises(FileError, match="but 'x' is neither"):
        ShardingPlan.from_json(json.dumps(data))


def test_hidden_time_in_the_text() -> None:
    said = "assumes 6 us of reductions hidden behind compute"
    assert said in str(hiding(6.0)).splitlines()[4] and "assumes" not in str(small_plan())
    assert f"beside compute  {said}" in inspect.summary(hiding(6.0)) and "beside compute" not in inspect.summary(small_plan())


def test_hidden_time_in_a_diff() -> None:
    """The redistribution becomes cheaper by as much as the objective; the hidden time is listed beside it."""
    found = fxshard.diff(small_plan(), hiding(6.0))
    (move,) = found.moves
    assert (move.before, move.after) == (7.5, 1.5) and found.objective == (10.75, 4.75)
    assert found.hidden == (("reductions", 0.0, 6.0),) and found.brief().endswith("hidden +6 us")
    lines = [line.split("  ") for line in str(found).splitlines()]
    assert ["hidden reductions", "0 us", "6 us", "+6 us"] in [[cell.strip() for cell in line if cell] for line in lines]
