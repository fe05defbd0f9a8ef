"""Plans for several sizes, compared with enumeration: no choice has a lower mean cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from passes.enumeration import FAST, SQUARE, TOY
from passes.mean_truth import MeanEnumeration
from passes.planning.test_formulate import check_optimal
from torch import nn

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.shapes import WeightedSizes, dynamic_dims

Sizes = Sequence[tuple[float, Mapping[str, int]]]


class Products(nn.Module):
    """Two products with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.inner(x)).sum(1)


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...], dict[int, str]]] = {
    "products": (Products, (8, 16), {0: "batch"}),
    "sums": (Sums, (8, 4, 8), {0: "batch", 1: "seq"}),
}
FAR: Sizes = ((0.9, {"batch": 4, "seq": 64}), (0.1, {"batch": 256, "seq": 4}))
NEAR: Sizes = ((0.5, {"batch": 8, "seq": 8}), (0.25, {"batch": 64, "seq": 8}), (0.25, {"batch": 12, "seq": 32}))
MESHES = (Mesh({"a": 2}, TOY), Mesh({"a": 4}, FAST), Mesh({"a": 4}, "h100"))


@cache
def traced(name: str, train: bool) -> PlanningGraph:
    model, shape, dims = MODELS[name]
    made, args = model(), (torch.zeros(shape),)
    return trace(made, args, train=train, dynamic=dynamic_dims(made, args, {}, (dims,)))


def at(graph: PlanningGraph, sizes: Sizes) -> tuple[WeightedSizes, ...]:
    assert graph.family is not None
    return tuple(WeightedSizes(tuple((dim.name, some[dim.name]) for dim in graph.family.dims), weight) for weight, some in sizes)


def check(graph: PlanningGraph, mesh: Mesh, sizes: Sizes, objective: str, layout: str) -> None:
    sampled = at(graph, sizes)
    plan = plan_graph(graph, mesh, Request(input_layouts=layout, output_layouts=layout, objective=objective, sampled=sampled))
    inputs = {end.node for end in graph.inputs_of("input")}
    keep: Any = lambda name, spec: name not in inputs or spec.outputs[0] == Layout.parse(layout)  # noqa: E731
    result: Any = lambda k, returned: graph.outputs[k].kind != "output" or returned == Layout.parse(layout)  # noqa: E731
    weights = [(one.weight, dict(one.sizes)) for one in sampled]
    check_optimal(plan, MeanEnumeration(annotate(graph, mesh, sampled), objective, keep, result, at=weights))
    assert plan.example_sizes == sampled


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m}-{m.hardware.name}")
@pytest.mark.parametrize("sizes", [FAR, NEAR], ids=["far", "near"])
@pytest.mark.parametrize("objective", ["time", "communication"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
def test_plans_have_the_lowest_mean_cost(name: str, mesh: Mesh, sizes: Sizes, objective: str, train: bool) -> None:
    check(traced(name, train), mesh, sizes, objective, "R")


@pytest.mark.parametrize("sizes", [FAR, NEAR], ids=["far", "near"])
@pytest.mark.parametrize("objective", ["time", "communication"])
def test_plans_on_two_axes_have_the_lowest_mean_cost(sizes: Sizes, objective: str) -> None:
    check(traced("products", False), SQUARE, sizes, objective, "S(0)R")
