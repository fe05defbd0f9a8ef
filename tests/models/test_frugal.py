"""What is kept for the backward in another layout, redistributed again or computed again there leaves the numbers as they are."""

from __future__ import annotations

import pytest
from equality import check, mesh_of, prepared

from fxshard.passes.annotate import annotate
from fxshard.testing.random_plan import random_graph_plan

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
