"""Memory over time of a plan, on models small enough to count on paper."""

from __future__ import annotations

import torch
from torch import nn

from fxshard.cost.planned_memory import planned_memory, workspace
from fxshard.mesh import Mesh
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace import trace
from fxshard.planning_graph import PlanningGraph
from fxshard.sharding_plan import ShardingPlan

W, X, Y = 100 * 200 * 4, 40 * 100 * 4, 40 * 200 * 4
"""Bytes of a weight [200, 100], an input [40, 100] and an output [40, 200] in float32."""


def planned(layouts: dict[str, str], train: bool, outputs: str) -> tuple[PlanningGraph, ShardingPlan]:
    graph = trace(nn.Linear(100, 200, bias=False), (torch.randn(40, 100),), train=train)
    return graph, plan_graph(graph, Mesh({"a": 2}), Request(pins=layouts, output_layouts=outputs))


def test_a_gathered_weight_lives_while_it_is_read() -> None:
    """Sharded data: the weight [200, 100] is gathered along its first dim, in one buffer."""
    graph, plan = planned({"weight": "S(0)", "args[0]": "S(0)", "einsum": "S(0)"}, False, "S(0)")
    profile = planned_memory(graph, plan)
    assert [(s.name, s.op) for s in profile.steps] == [("weight", "all_gather a"), ("einsum", "fxshard.einsum.default")]
    assert profile.over_time == (W // 2 + X // 2 + W, W // 2 + X // 2 + W + Y // 2)
    assert profile.by_kind() == {"parameter": W // 2, "input": X // 2, "output": Y // 2, "gathered": W}


def test_along_another_dim_the_pieces_are_put_in_place() -> None:
    graph, plan = planned({"weight": "S(1)", "args[0]": "S(0)", "einsum": "S(0)"}, False, "S(0)")
    profile = planned_memory(graph, plan)
    assert profile.over_time == (W // 2 + X // 2 + W, W // 2 + X // 2 + 2 * W, W // 2 + X // 2 + W + Y // 2)


def test_gradients_and_the_optimisers_state() -> None:
    """Replicated weight, sharded data: the backward's tangent, the gradient and what reduces it; Adam keeps two more."""
    graph, plan = planned({"weight": "R", "args[0]": "S(0)", "einsum": "S(0)", "einsum_1": "P"}, True, "S(0)")
    profile = planned_memory(graph, plan, "adam")
    always = W + X // 2 + Y // 2
    assert profile.over_time == tuple(2 * W + n for n in (always, always + Y // 2 + W, always + Y // 2 + 2 * W))
    assert profile.by_kind() == {
        "parameter": W,
        "optimizer": 2 * W,
        "input": X // 2 + Y // 2,
        "gradient": W,
        "output": Y // 2,
        "temporary": W,
    }
    assert [t.layout for t in profile.alive() if t.kind == "gradient"] == ["R"]


def test_what_a_kernel_takes_is_learned_from_it() -> None:
    """Of a softmax in pieces the sum of exponentials needs the exponentials themselves; a matmul's kernel says nothing."""
    graph = trace(nn.Softmax(-1), (torch.randn(64, 32),), train=False)
    taken = {n.target: workspace(n) for n in graph.nodes if n.op == "call_function"}
    assert taken[torch.ops.fxshard.sum_exp.default] >= 64 * 32 * 4
    assert workspace(next(n for n in trace(nn.Linear(4, 4, bias=False), (torch.randn(4, 4),)).nodes if n.op == "call_function")) == 0
