"""For any choice, the solver's problem under a memory limit gives the cost of the plan and an upper bound of its memory."""

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
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.formulation import Formulation
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
    """Random choices of finite cost: about half of the blocks recomputed, each node in a state that its edges allow."""
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
    for node in kept:  # in a layout that the producer allows
        choices[node] = draw.choice(allowed(node))
    for _ in range(10 * len(choices)):
        node = draw.randrange(len(choices))
        choices[node] = draw.choice(allowed(node))
    return choices


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_cost_and_memory_of_any_choice_agree_with_its_plan(mesh: Mesh) -> None:
    annotated = annotate(GRAPH, mesh)
    constraints = constraints_of(GRAPH, mesh, memory_limit=10**9)
    formulation = formulate(annotated, constraints)
    redone, again = 0, 0
    for seed in range(4 // mesh.ndim):
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
    """Under falling limits the program stays within the limit, and at some point blocks are recomputed."""
    free = plan_graph(GRAPH, MESHES[0], Request(input_layouts="S(0)"))
    before, redone = free, 0
    for share in (0.9, 0.8):
        limit = int(share * sum(free.memory.values()))
        plan = plan_graph(GRAPH, MESHES[0], Request(input_layouts="S(0)", memory_limit=limit, time_limit=5))
        assert plan.objective >= before.lower_bound and plan.lower_bound >= free.lower_bound * (1 - 1e-9)
        assert program_memory(lower(GRAPH, plan)).peak <= 1.01 * limit
        before, redone = plan, redone + len(plan.recomputed)
    assert redone


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    """Only under a limit that binds must each value be saved in one layout; otherwise the plan without a limit is used."""
    for mesh in MESHES:
        free = plan_graph(GRAPH, mesh, Request())
        plan = plan_graph(GRAPH, mesh, Request(memory_limit=sum(free.memory.values())))
        assert plan.nodes == free.nodes and plan.redistributions == free.redistributions and plan.certificate == free.certificate


def test_the_last_block_is_not_recomputed() -> None:
    """If the model ends with this block, its second run would come before the start of the backward."""
    modes = Modes(trace(nn.Sequential(*(Gate(8) for _ in range(3))), (torch.randn(4, 8),)))
    assert [block.name for block in modes.blocks] == ["0", "1"]
    assert all(modes.times.time[block.before] > modes.times.backward_start for block in modes.blocks)


def test_lifetimes_of_recomputed_values() -> None:
    """A recomputed value that only its block reads dies after its last reader there, not at the end of the block."""
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
