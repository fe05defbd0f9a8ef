"""Frugal plans save values for the backward in other layouts, redistribute again or recompute: the numbers stay the same."""

from __future__ import annotations

import pytest
from equality import check, mesh_of, prepared

from fxshard.errors import PlanError
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import lower_plan
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.testing.random_plan import random_graph_plan
from tests.plans.small_plans import by_hand

SLICE = [("mlp", "a=2"), ("llama", "a=2"), ("llama_batch5", "a=4")]


@pytest.mark.parametrize(("name", "mesh"), SLICE)
def test_random_plans(name: str, mesh: str) -> None:
    _, graph, _ = prepared(name)
    annotated = annotate(graph, mesh_of(mesh))
    plans = [random_graph_plan(annotated, seed, frugal=True) for seed in range(2)]
    for plan in plans:
        check(name, plan)
    assert any(r.ahead for plan in plans for r in plan.redistributions)
    assert any(plan.recomputed for plan in plans)


def test_an_unknown_block_to_recompute_is_named() -> None:
    """In a plan file that was edited by hand."""
    _, graph, _ = prepared("mlp")
    plan = random_graph_plan(annotate(graph, mesh_of("a=2")), 0, frugal=True)
    ((name, nodes), *_) = plan.recomputed.items()
    renamed = ShardingPlan.from_json(by_hand(plan).replace(f'"block": "{name}"', f'"block": "{name}9"'))
    assert renamed.recomputed[f"{name}9"] == nodes
    with pytest.raises(PlanError, match=rf"computes '{name}9' again, which is no block of this model; did you mean"):
        lower_plan(graph, renamed)
