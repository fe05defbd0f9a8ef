"""The data that ``fxshard inspect --json`` prints: JSON, with totals that agree with the items."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

from hypothesis import HealthCheck, given, settings

from fxshard import inspect
from fxshard.plans.plan_data import Place
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import plans, small_plan
from tests.programs import small_program


@given(plans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_the_traffic_of_any_plan_adds_up(plan: ShardingPlan) -> None:
    data = json.loads(json.dumps(inspect.to_json(plan)))
    sent: Counter[tuple[str, str]] = Counter()
    for c in data["collectives"]:
        sent[c["kind"], c["axis"]] += c["bytes"]
    assert {(t["kind"], t["axis"]): t["bytes"] for t in data["traffic"]} == dict(sent)
    assert sum(t["count"] for t in data["traffic"]) == len(plan.collectives)
    assert data["hash"] == plan.hash


def test_the_hash_leaves_out_what_decides_nothing() -> None:
    plan = dataclasses.replace(small_plan(), results={"mm": (0,)}, reads={"mm": ("x",)}, model="Net", places={"mm": Place("lin")})
    assert inspect.to_json(plan)["hash"] == plan.hash == small_plan().hash


def test_a_program_has_inputs_and_outputs_too() -> None:
    plan, program = inspect.to_json(small_plan()), inspect.to_json(small_program(5))
    assert (plan["kind"], program["kind"]) == ("plan", "program")
    assert "inputs" not in plan
    assert program["size_classes"] == 2
    assert program["outputs"] == [{"kind": "output", "name": "outputs[0]", "layout": "S(0)R", "shape": [5, 4], "dtype": "torch.float32"}]
    assert program["collectives"][0]["node"] == "all_reduce_default"


def test_bytes_of_an_all_reduce() -> None:
    """3 rows of 4 floats per rank; in a ring of two, each rank sends half of them twice."""
    assert inspect.to_json(small_plan())["traffic"] == [{"kind": "all_reduce", "axis": "tp", "count": 1, "bytes": 3 * 4 * 4}]
