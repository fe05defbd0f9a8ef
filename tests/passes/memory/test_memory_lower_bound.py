"""At every time a plan's memory lies between the solver's two estimates: the floor, which every plan needs, and an upper bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.planning.choose import memory_over_time
from fxshard.passes.planning.constrain import constraints_of
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.formulation import Formulation
from fxshard.passes.trace.trace import trace
from fxshard.solver import PlacementProblem, solve
from tests.passes.random_models import drawn
from tests.slices import diagonal, few


class Block(nn.Module):
    """Values with one reader and with several, views of them, and products that forward and backward read."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.up(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        return x + self.down(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(12, dim), nn.Sequential(Block(dim), Block(dim)), nn.Linear(dim, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(tokens))).flatten(0, 1), tokens.flatten())


def usage(problem: PlacementProblem, choices: Sequence[int], times: int) -> np.ndarray:
    """Memory at each time, by ``Live.total`` of the problem."""

    def at(t: int) -> float:
        return sum(live.total(problem.transfers, choices) for live in problem.all_lives if live.lo <= t < live.hi)

    return np.array([at(t) for t in range(times)])


def random_choices(formulation: Formulation, seed: int) -> tuple[int, ...]:
    """Random legal choices: the cheapest for random costs of nodes, free redistributions and no memory limit."""
    drawn, problem = np.random.default_rng(seed), formulation.problem
    costs = tuple(np.where(np.isinf(c), np.inf, drawn.uniform(0, 100, len(c))) for c in problem.node_costs)
    free = tuple(replace(t, prices=np.where(np.isinf(t.prices), np.inf, 0.0)) for t in problem.transfers)
    loose = replace(problem, node_costs=costs, transfers=free, usage_limit=None, lives=())
    return without_unused_saves(formulation, solve(loose, work_limit=2e7, start=formulation.start).choices)


def without_unused_saves(formulation: Formulation, choices: Sequence[int]) -> tuple[int, ...]:
    """The same plan, without values that are saved only for blocks which are not recomputed."""
    found = list(choices)
    redone = {node for var, block in formulation.blocks.items() if choices[var] for node in block.nodes}
    for one in formulation.kept:
        if not one.crossing.late and not redone & set(one.crossing.redone):
            found[one.var] = one.layouts.index(None)
    return tuple(found)


def check(graph: PlanningGraph, mesh: str, seeds: range) -> int:
    """Checks the plan of each seed; returns how many of them recompute blocks."""
    annotated, constraints = (
        annotate(graph, parse_mesh(mesh)),
        constraints_of(graph, parse_mesh(mesh), memory_limit=10**9, optimizer="adam"),
    )
    formulation = formulate(annotated, constraints)
    assert formulation.relaxed is not None
    runs, redone = sorted(formulation.times.values()), 0
    for seed in seeds:
        choices = random_choices(formulation, seed)
        redone += any(choices[var] for var in formulation.blocks)
        held = memory_over_time(annotated, constraints, formulation, choices)
        low, high = (usage(problem, choices, len(held)) for problem in (formulation.relaxed, formulation.problem))
        ran = held[runs] > 0  # a second run that does not happen holds nothing
        assert (low[runs] <= held[runs] + 1e-6)[ran].all(), f"seed {seed}"
        assert (held[runs] <= high[runs] + 1e-6)[ran].all(), f"seed {seed}"
    return redone


@pytest.mark.parametrize(("mesh", "train"), diagonal(["a=2,b=2", "a=2"], [True, False]))
def test_every_plan_is_between_the_estimates(mesh: str, train: bool) -> None:
    graph = trace(Model(), (torch.randint(0, 12, (4, 4)),), train=train)
    assert check(graph, mesh, range(6)) or not train


def test_the_relaxed_problem_of_a_chain_is_exact() -> None:
    """If each value has one reader, directly or through views, the relaxed problem is the memory of the plan."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return ((x @ w).view(-1, 2, 8).transpose(0, 1).relu().reshape(-1, 8) @ v).sin()

    mesh = parse_mesh("a=2")
    graph = trace(Chain(), (torch.randn(16, 8), torch.randn(8, 16), torch.randn(8, 8)), train=False)
    annotated, constraints = annotate(graph, mesh), constraints_of(graph, mesh, memory_limit=10**9)
    formulation = formulate(annotated, constraints)
    assert formulation.relaxed is not None
    for seed in range(8):
        choices = random_choices(formulation, seed)
        held = memory_over_time(annotated, constraints, formulation, choices)
        assert usage(formulation.relaxed, choices, len(held)) == pytest.approx(held), f"seed {seed}"


def test_a_value_that_is_saved_and_returned_may_die_before_the_end() -> None:
    """It is read by the loss, saved for the backward and returned. None of these needs its original layout until the end."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = self.layer(x)
            return scores, F.cross_entropy(scores, y)

    check(trace(Scored(), (torch.randn(8, 4), torch.randint(0, 6, (8,)))), "a=2", range(12))


def test_a_returned_value_that_only_the_backward_reads() -> None:
    """The softmax at the end of a model: nothing in the forward reads it; the backward reads it before it is returned."""

    class Ended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 8), nn.Softmax(-1))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layers(x), *x.sort(1)[:1]

    check(trace(Ended(), (torch.randn(8, 8),)), "a=2", range(30))


def test_a_copy_for_a_view_that_is_returned() -> None:
    """The gradient of a bias is a view of the tangent. The copy of the tangent made for this view dies when the view is redistributed."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.bias.view(2, 6)

    check(trace(Biased(), (torch.randn(2, 4),)), "a=2", range(30))


def test_blocks_that_read_a_view_made_before_them() -> None:
    """To be recomputed, a block needs the base of the view, which nothing else reads. The base may be another block's result."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shown = x.sin().t()
            for layer in self.layers:
                x = layer(x + shown).relu().t()
            return x.sum()

    assert check(trace(Turned(), (torch.randn(8, 8),)), "a=2", range(30))


@pytest.mark.parametrize("seed", few(6, range(16)))
def test_random_models(seed: int) -> None:
    model, args = drawn(seed)
    check(trace(model, args, train=seed % 4 > 0), ("a=2", "a=3", "a=2,b=2")[seed % 3], range(8))
