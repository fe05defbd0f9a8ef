"""What a problem under a memory limit says of any choice: what the plan costs, and at least what its program holds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.memory.saved_for_backward import Modes
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning.choose import _decision, write_plan
from fxshard.passes.planning.constrain import constraints_of
from fxshard.passes.planning.formulate import Formulation, formulate
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.memory import program_memory

SLOW = Hardware("slow", {4: 1e9}, 1e10, 0.0, 64, Link(1e9, 0.0), Link(1e9, 0.0), overlap=0.5)
MESHES = (Mesh({"a": 2}, SLOW), Mesh({"a": 2, "b": 2}, SLOW))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Gate(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * x


class Model(nn.Module):
    """Blocks in a list, and a table that all of them read."""

    def __init__(self, depth: int = 3, dim: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.exp()
        for layer in self.layers:
            x = layer(x) * scale
        return x.sum()


GRAPH = trace(Model(), (torch.randn(64, 16),))


def random_choices(formulation: Formulation, seed: int) -> list[int]:
    """Choices that nothing forbids: every other block computed again, each node something that goes with what it is tied to."""
    problem, draw = formulation.problem, random.Random(seed)
    choices = list(formulation.start)
    ties: dict[int, list[tuple[int, np.ndarray]]] = {}
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        ties.setdefault(i, []).append((j, costs))
        ties.setdefault(j, []).append((i, costs.T))

    def allowed(node: int) -> list[int]:
        states = range(len(problem.node_costs[node]))
        return [s for s in states if all(np.isfinite(costs[s, choices[other]]) for other, costs in ties.get(node, ()))]

    for hub in formulation.blocks:
        if draw.random() < 0.5:
            choices[hub] = 1
            for node, costs in ties[hub]:
                choices[node] = draw.choice(np.flatnonzero(np.isfinite(costs[1])).tolist())
    kept = [one.var for one in formulation.kept]
    for node in kept:  # as the node says that makes it
        choices[node] = draw.choice(allowed(node))
    for _ in range(10 * len(choices)):
        node = draw.randrange(len(choices))
        choices[node] = draw.choice(allowed(node))
    return choices


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_choice_costs_and_holds_what_its_plan_does(mesh: Mesh) -> None:
    annotated = annotate(GRAPH, mesh)
    constraints = constraints_of(GRAPH, mesh, memory_limit=10**9)
    formulation = formulate(annotated, constraints)
    redone, again = 0, 0
    for seed in range(8):
        choices = random_choices(formulation, seed)
        cost, peak = formulation.problem.evaluate(choices), formulation.problem.peak(choices)
        decision = _decision(GRAPH, formulation, choices)
        plan = write_plan(annotated, decision, formulation.price, formulation.unit)
        assert plan.objective == pytest.approx(cost, rel=1e-9)
        assert sum(plan.memory.values()) <= peak
        redone, again = redone + len(decision.recomputed), again + sum(r.ahead for r in plan.redistributions)
        program = lower(GRAPH, plan)
        assert program_memory(program).peak <= 1.05 * peak
    assert redone and again


def test_less_memory_costs_more() -> None:
    """Under ever lower limits: within the limit as a program too, and at some point by computing again."""
    free = plan_graph(GRAPH, MESHES[0], Request(input_layouts="S(0)"))
    before, redone = free, 0
    for share in (1.2, 0.9, 0.8):
        limit = int(share * sum(free.memory.values()))
        plan = plan_graph(GRAPH, MESHES[0], Request(input_layouts="S(0)", memory_limit=limit, time_limit=5))
        assert plan.objective >= before.lower_bound and plan.lower_bound >= free.lower_bound * (1 - 1e-9)
        assert program_memory(lower(GRAPH, plan)).peak <= 1.01 * limit
        before, redone = plan, redone + len(plan.recomputed)
    assert redone


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    """A value is kept in one layout only where a limit binds: the plan without one is better where it fits."""
    for mesh in MESHES:
        free = plan_graph(GRAPH, mesh, Request())
        plan = plan_graph(GRAPH, mesh, Request(memory_limit=sum(free.memory.values())))
        assert plan.nodes == free.nodes and plan.redistributions == free.redistributions and plan.certificate == free.certificate


def test_what_the_backward_begins_with_is_not_computed_again() -> None:
    """The last block of a model that ends in it: its second run would stand before the backward."""
    modes = Modes(trace(nn.Sequential(*(Gate(8) for _ in range(3))), (torch.randn(4, 8),)))
    assert [block.name for block in modes.blocks] == ["0", "1"]
    assert all(modes.times.time[block.before] > modes.times.backward_start for block in modes.blocks)


def test_what_is_made_again_is_there_from_then_on() -> None:
    """Not as long as all of its block: what nothing in the backward reads is gone once the last node that is made again has read it."""
    modes, found = Modes(GRAPH), 0
    for block in modes.blocks:
        places = [modes.times.recomputed_at[n] for n in block.nodes]
        assert places == list(range(places[0], places[-1] + 1)) and places[-1] + 1 == modes.times.time[block.before]
        for node in block.nodes:
            readers = modes.times.readers.get(node, ())
            if readers and all(r in block.nodes and not modes.times.is_view(r) for r in readers):
                assert modes.recomputed_span(node) == (
                    modes.times.recomputed_at[node],
                    max(modes.times.recomputed_at[r] for r in readers) + 1,
                )
                found += 1
    assert found
