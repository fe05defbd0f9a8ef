"""plan.explain: the cost that it states for another layout is the cost of planning again with that layout pinned."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo import Case, cnn, llama, mlp

import fxshard
from fxshard.errors import ConstraintError, LayoutError, PlanError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import all_layouts
from fxshard.passes.annotation.verify import verify_edges
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning.origin import NEAR, Origin
from fxshard.plans.comparison import signed
from fxshard.plans.sharding_plan import ShardingPlan

FAST = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")
LINE = fxshard.Mesh({"tp": 3})


class Parts(nn.Module):
    """Operators with several results, one of them unused; tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, _ = self.first(x).split(4, -1)
        return torch.topk(a * b.exp(), 2).values + self.second(x)[:, :2]


def parts() -> Case:
    return Parts(), (torch.ones(6, 8),), {}


CASES: list[tuple[Callable[[], Case], fxshard.Mesh, dict[str, Any]]] = [
    (mlp, FAST, {"objective": "communication", "input_layouts": "S(0)R"}),
    (cnn, LINE, {"memory_limit": 80000}),
    (llama, FAST, {"objective": "communication", "input_layouts": "S(0)R", "output_layouts": "RR"}),
    (llama, LINE, {"train": False, "input_layouts": "S(0)"}),
    (parts, FAST, {"output_layouts": "S(0)R", "input_layouts": "S(0)S(1)", "objective": "communication"}),
]


def names(plan: ShardingPlan) -> list[str]:
    return [*(end.name for end in plan.inputs if end.kind != "seed"), *(n.name for n in plan.nodes if n.op.startswith(("aten", "fxshard")))]


def in_groups(plan: ShardingPlan) -> set[str]:
    """Nodes of norms, softmax and losses. The nodes of one such operator share a solver variable unless one of them is pinned."""
    said = ("row_", "channel_", "batch_", "normalise", "running", "softmax", "sum_exp", "sum_product", "amax")
    return {n.name for n in plan.nodes if any(word in n.op for word in said)}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_costs_are_those_of_planning_again(number: int) -> None:
    make, mesh, options = CASES[number]
    model, args, kwargs = make()
    plan = fxshard.plan(model, args, mesh, kwargs, **options)
    assert isinstance(plan.origin, Origin)
    graph: PlanningGraph = plan.origin.annotated.graph
    rng, asked = random.Random(number), 0
    for name in rng.sample(names(plan), 5):
        node = plan.node_of(name)
        shapes = next(n.shapes for n in plan.nodes if n.name == node)
        layout = str(rng.choice(all_layouts(len(shapes[0]), mesh.shape, ("sum",))))
        (choice,) = plan.explain(name if len(shapes) == 1 else f"{name}[0]", layout).choices
        pin = (layout, *[None] * (len(shapes) - 1)) if len(shapes) > 1 else layout
        try:
            fresh = plan_graph(graph, mesh, Request(pins={name: pin}, **options))
        except ConstraintError:
            assert choice.total is None and choice.reason
            continue
        if choice.total is None:
            assert node in in_groups(plan) and "together" in choice.reason
            continue
        asked += 1
        assert choice.plan is not None and choice.lower_bound is not None
        assert str(choice.plan.layout_of(name)) == layout
        if node in in_groups(plan):  # a pin splits the group, so a few more plans are possible
            assert choice.total >= fresh.objective * (1 - 1e-9)
            continue
        assert choice.lower_bound <= fresh.objective * (1 + 1e-9) and fresh.lower_bound <= choice.total * (1 + 1e-9)
        assert fresh.gap < 1e-8 and choice.gap is not None and choice.gap <= NEAR
        assert choice.total == pytest.approx(fresh.objective, rel=max(1e-8, choice.gap))
        verify_edges(graph, choice.plan)
    assert asked


def small() -> tuple[ShardingPlan, nn.Module, tuple[torch.Tensor, ...]]:
    model, args, _ = mlp()
    return fxshard.plan(model, args, FAST, input_layouts="S(0)R"), model, args


def test_the_plans_own_layout_costs_what_the_plan_costs_and_others_are_sorted() -> None:
    plan, _, _ = small()
    explained = plan.explain("up.0.weight")
    assert (explained.node, explained.op, explained.layout) == ("up_0_weight", "parameter", plan.layout_of("up.0.weight"))
    (own,) = [c for c in explained.choices if c.chosen]
    assert own.total == explained.total == plan.objective and explained.difference(own) == 0.0
    totals = [c.total for c in explained.choices if c.total is not None]
    assert totals == sorted(totals) and len(totals) == 9
    assert all(c.lower_bound is not None and c.lower_bound <= c.total for c in explained.choices if c.total is not None)
    assert {r.what for r in explained.readings} == {"fxshard.einsum.default"}
    assert explained.readings[0].line.endswith("x = down(F.gelu(up(x)))")


def test_the_parts_of_a_difference_add_up() -> None:
    plan, _, _ = small()
    explained = plan.explain("gelu")
    for choice in explained.choices:
        if choice.where is not None and choice.total is not None:
            computing = sum(c.after - c.before for c in choice.where.compute)
            moving = sum((m.after or 0.0) - (m.before or 0.0) for m in choice.where.moves)
            assert computing + moving == pytest.approx(choice.total - plan.objective, abs=1e-9)
            assert signed(choice.total - plan.objective, "microseconds") in str(explained)


def test_a_question_about_one_layout() -> None:
    plan, _, _ = small()
    (all_of_it,) = [c for c in plan.explain("down.1.weight").choices if c.layout == "S(0)S(1)"]
    explained = plan.explain("down.1.weight", "S(0)S(1)")
    (choice,) = explained.choices
    assert (choice.layout, choice.total) == ("S(0)S(1)", all_of_it.total)
    text = str(explained)
    assert "redistribution of" in text and "S(0)S(1)" in text and " us " in text
    free = plan.explain("down.1.weight", {"tp": fxshard.Layout.parse("S(1)")[0]}).choices[0]  # any placement on dp
    assert free.layout == "*S(1)" and free.total is not None and all_of_it.total is not None and free.total <= all_of_it.total


def test_an_impossible_layout_has_a_reason() -> None:
    plan, model, args = small()
    (choice,) = plan.explain("gelu", "PR").choices
    assert choice.total is None and choice.reason == "aten.gelu.default never gives it" and choice.reason in str(plan.explain("gelu", "PR"))
    pinned = fxshard.plan(model, args, FAST, pins={"up.0.weight": "RR"})
    assert "pins of this plan" in pinned.explain("up.0.weight", "RS(0)").choices[0].reason
    with pytest.raises(LayoutError, match="has 1 placement"):
        plan.explain("gelu", "R")
    with pytest.raises(PlanError, match=r"'up.0.wight'; did you mean 'up.0.weight'"):
        plan.explain("up.0.wight")


def test_copies_and_loaded_plans_cannot_explain(tmp_path: Any) -> None:
    plan, _, _ = small()
    plan.save(tmp_path / "plan.json")
    others = [pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan), ShardingPlan.load(tmp_path / "plan.json")]
    for other in (*others, dataclasses.replace(plan)):
        assert other == plan and other.hash == plan.hash and other.to_json() == plan.to_json()
        with pytest.raises(PlanError, match="does not know the graph") as error:
            other.explain("gelu")
        assert "plan again" in str(error.value)


def test_a_limit_that_does_not_bind_is_ignored_by_questions() -> None:
    """In the solver's estimate of memory the plan itself may exceed the limit. An answer that exceeds it is still not given."""
    model, mesh = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))), fxshard.Mesh({"tp": 4})
    free = fxshard.plan(model, (torch.ones(64, 64),), mesh, cache=False, train=False)
    limit = sum(free.memory.values())
    plan = fxshard.plan(model, (torch.ones(64, 64),), mesh, cache=False, train=False, memory_limit=limit)
    assert plan.objective == free.objective
    asked = plan.explain("0.weight")
    assert [c.total for c in asked.choices if c.chosen] == [plan.objective]
    assert all(c.plan is None or sum(c.plan.memory.values()) <= limit for c in asked.choices)
    without = {c.layout: c for c in free.explain("0.weight").choices}
    beyond = [c for c in asked.choices if (other := without[c.layout].plan) is not None and sum(other.memory.values()) > limit]
    for choice in asked.choices:
        total = without[choice.layout].total
        assert choice.total == total or (choice in beyond and (choice.total is None or choice.total >= (total or 0.0)))
