"""A memory limit holds in the lowered program, also for values that are returned and read, returned twice or only returned."""

from __future__ import annotations

import re
from typing import Any

import pytest
from passes.enumeration import Const as C
from passes.enumeration import aten, build, ops

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph

MATMUL = C("mk,kn->mn")
READ: list[tuple[Any, ...]] = [(aten.relu.default, 0), (aten.sin.default, 1), (ops.einsum.default, 2, 2, MATMUL)]
GRAPHS: dict[str, tuple[PlanningGraph, Any]] = {
    "returned and read": (build([(64, 64)], READ, [1, 3]), None),
    "returned twice": (build([(64, 64)], [(aten.relu.default, 0), (ops.einsum.default, 0, 0, MATMUL)], [1, 1, 2]), ["S(0)", "S(1)", "R"]),
    "only returned": (build([(64, 64)], [(ops.einsum.default, 0, 0, MATMUL), (aten.relu.default, 1)], [1, 2]), None),
}


FEW, LINE, PLANE = Mesh({"tp": 4}), Mesh({"tp": 18}), Mesh({"dp": 4, "tp": 5})
"""The last two shard 64 elements into more than 16 chunks of unequal lengths."""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [*((name, FEW) for name in GRAPHS), *((name, mesh) for name in ("returned twice", "only returned") for mesh in (LINE, PLANE))],
    ids=str,
)
def test_the_program_keeps_to_the_limit(name: str, mesh: Mesh) -> None:
    """The program's peak, counted by its storages, is within the limit, for the smallest limit with a plan and for two larger ones."""
    graph, layouts = GRAPHS[name]
    layouts = layouts and [layout if mesh.ndim == 1 else layout + "R" for layout in layouts]
    free = sum(plan_graph(graph, mesh, Request(output_layouts=layouts)).memory.values())
    with pytest.raises(fxshard.errors.ConstraintError) as error:
        plan_graph(graph, mesh, Request(output_layouts=layouts, memory_limit=1))
    (exact,) = re.findall(r"least found is (?:[^()]*\()?([\d,]+) bytes", str(error.value.remedy))
    least = int(exact.replace(",", ""))
    for limit in (least, (least + free) // 2, 2 * free):
        if limit >= least:
            plan = plan_graph(graph, mesh, Request(output_layouts=layouts, memory_limit=limit))
            peak = fxshard.program_memory(lower_plan(graph, plan)).peak
            assert peak <= 1.01 * limit, plan  # the plan does not count the rank's axis indexes
