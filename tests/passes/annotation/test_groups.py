"""The nodes of a decomposed operator share one solver variable: which nodes these are, and that the optimum does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.graph.planning_graph import is_getitem, planned_nodes
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation import groups as groups_module
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.annotation.groups import groups, joint_specs
from fxshard.passes.trace.trace import trace


class Normed(nn.Module):
    """Two norms around a matmul, and a softmax."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.before, self.after, self.linear = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(self.before(x))).softmax(-1)


def example(*shape: int) -> tuple[Any, ...]:
    return (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),)


def test_groups_of_a_norm_and_a_softmax() -> None:
    graph = trace(Normed().double(), example(4, 8), train=True)
    found = [[str(n.target).split(".")[1] for n in group.nodes] for group in groups(graph, lambda node: True)]
    norm = ["row_sum", "row_spread", "row_rstd", "row_mean", "row_normalise"]
    weights = ["row_norm_weight", "row_norm_weight"]
    backward = [weights, ["row_norm_sums", "row_norm_backward", *weights], ["sum_product", "softmax_backward"]]
    assert sorted(found) == sorted([norm, norm, ["amax", "sum_exp", "softmax"], *backward]), (
        "x needs no gradient, so the first norm has no operator for it"
    )


def test_a_node_that_the_user_pins_stays_apart() -> None:
    graph = trace(Normed().double(), example(4, 8), train=False)
    spoken = next(n for n in planned_nodes(graph) if "row_rstd" in str(n.target))
    assert all(spoken not in group.nodes for group in groups(graph, lambda node: node is not spoken))


def test_joint_specs_begin_with_replicated_ones() -> None:
    graph = trace(Normed().double(), example(4, 8), train=True)
    annotated = annotate(graph, Mesh({"tp": 2}))
    for group in groups(graph, lambda node: True):
        states = joint_specs(group, annotated.specs)
        assert states[0] == (0,) * len(group.nodes) and len(set(states)) == len(states)
        cut = [annotated.specs[n.name][k].outputs[0] for n, k in zip(group.nodes, states[-1], strict=True)]
        assert not all(layout is None or layout.is_replicated for layout in cut)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("objective", ["time", "communication"])
def test_the_optimum_does_not_change(mesh: dict[str, int], objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the same problem with one variable for each node."""

    settings: dict[str, Any] = {"input_layouts": "S(1)" + "R" * (len(mesh) - 1), "objective": objective}

    def objective_of() -> float:
        plan = fxshard.plan(Normed().double(), example(4, 8), Mesh(mesh, hardware="cpu"), **settings)
        assert plan.certificate.gap == 0
        return plan.objective

    together = objective_of()
    monkeypatch.setattr(groups_module, "FAMILIES", ())
    assert together == pytest.approx(objective_of(), rel=1e-9)


def test_a_norm_over_a_sharded_dim_reduces_statistics_only() -> None:
    """A sum and a spread in the forward, two sums in the backward; x itself is never redistributed."""
    model, (x,) = nn.LayerNorm(6).double(), example(4, 6)
    ends = {"input_layouts": "S(1)", "output_layouts": "S(1)", "pins": {"weight": "S(0)", "bias": "S(0)"}}
    plan = fxshard.plan(model, (x.requires_grad_(),), Mesh({"tp": 3}), objective="communication", **ends)
    assert [c.kind for c in plan.collectives] == ["all_reduce"] * 3
    assert sorted(c.buffer for c in plan.collectives) == [(2, 4, 1), (4, 1), (4, 1)]


def test_norms_that_feed_each_other_are_decided_apart() -> None:
    """One variable for two norms would have as many states as the product of theirs."""
    graph = trace(nn.Sequential(*(nn.LayerNorm(8) for _ in range(4))).double(), example(4, 8), train=True)
    assert sorted(len(g.nodes) for g in groups(graph, lambda node: True)) == [2, 4, 4, 4, 5, 5, 5, 5]


def test_norms_with_one_gradient_are_decided_apart() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.c(x)) + self.b(x.sin() * self.c.weight.sum())

    graph = trace(Parallel().double(), example(4, 8), train=True)
    for group in groups(graph, lambda node: True):
        assert sum("row_norm_backward" in str(n.target) for n in group.nodes) <= 1


def test_a_group_with_too_many_states_has_no_joint_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    annotated = annotate(trace(Normed().double(), example(4, 8), train=False), Mesh({"tp": 2}))
    group = groups(annotated.graph, lambda node: True)[0]
    groups_module._joint.cache_clear()
    monkeypatch.setattr(groups_module, "MAX_STATES", 2)
    assert joint_specs(group, annotated.specs) == ()
    groups_module._joint.cache_clear()


def test_two_getitems_of_one_output_are_one_value() -> None:
    """Tracing makes one getitem for each output of an operator. A second one of the same output is the same value to a group."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.split(2)[1])

    graph = trace(Part().double(), example(4, 8), train=False)
    picked = next(n for n in graph.nodes if is_getitem(n))
    assert len([n for n in graph.nodes if is_getitem(n)]) == 1
    before = groups(graph, lambda node: True)[0].sources
    last = next(n for n in graph.nodes if "row_normalise" in str(n.target))
    with graph.module.graph.inserting_before(last):
        last.replace_input_with(picked, graph.module.graph.node_copy(picked))
    assert groups(graph, lambda node: True)[0].sources == before
