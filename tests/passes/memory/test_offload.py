"""Under a memory limit, what is held on the host: the cheapest choice by enumeration, and memory between the solver's two estimates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import ConstraintError, OptionError
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning.choose import _decision, memory_over_time, write_plan
from fxshard.passes.planning.constrain import constraints_of
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.formulation import Formulation
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.solver import Budget, Counts, InfeasibleError, LimitedSession
from tests.passes.memory.test_memory_lower_bound import Model, random_choices, usage

TOY = Hardware("toy", {4: 1e9}, 1e9, 0.0, 64, Link(1e8, 1.0), Link(1e8, 1.0), host=Link(2e8, 3.0))
SIZES = ((4, 6), (6, 10), (10, 3))


class Layers(nn.Module):
    """Parameters of different sizes, and a batch whose activations are large in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in SIZES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


def planned(limit: int | None, offload: object = True, **more: object) -> ShardingPlan:
    return fxshard.plan(
        Layers(), (torch.randn(8, 4),), Mesh({"a": 2}, TOY), memory_limit=limit, optimizer="adamw", offload=offload, cache=False, **more
    )


def test_the_states_of_least_cost_are_on_the_host() -> None:
    """All layouts are pinned, so that only the states' places are open: each subset of them is tried."""
    whole = {"*": "R"}
    free = planned(None, pins=whole, offload=False)
    state = {f"layers.{k}.weight": 8 * a * b for k, (a, b) in enumerate(SIZES)}
    profile = planned(10**9, pins=whole, offload=False).memory_profile()
    least = np.array(profile.over_time) - sum(state.values())
    for limit in np.linspace(least.max() + 2 * max(state.values()), free.memory_profile().peak, 5).astype(int):
        costs = []
        for chosen in itertools.chain.from_iterable(itertools.combinations(state.values(), n) for n in range(4)):
            held = least + sum(state.values()) - sum(chosen)
            held[-1] += 2 * max(chosen, default=0)
            if held.max() <= limit:
                costs.append(sum(2 * size / 2e8 * 1e6 + 4 * 3.0 for size in chosen))
        plan = planned(int(limit), pins=whole, offload="optimizer")
        assert plan.objective == pytest.approx(free.objective + min(costs)) and not plan.gap
        assert sum(one.cost for one in plan.offloaded) == pytest.approx(min(costs))


@pytest.mark.parametrize(("part", "kinds"), [(0.6, True), pytest.param(0.8, True, marks=pytest.mark.slow), (0.8, "optimizer")])
def test_the_optimum_over_all_states_of_the_problem(part: float, kinds: object) -> None:
    """A model of one weight: every choice of the problem, its exact memory counted."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    mesh = Mesh({"a": 2}, TOY)
    graph = trace(One(), (torch.randn(4, 6),))
    annotated = annotate(graph, mesh)
    whole = {"input_layouts": "R", "output_layouts": "R"}
    most = sum(plan_graph(graph, mesh, Request(optimizer="adam", cache=False, **whole)).memory.values())
    asked = constraints_of(graph, mesh, memory_limit=int(part * most), optimizer="adam", offload=kinds, **whole)
    made = formulate(annotated, asked)
    assert made.relaxed is not None
    counts = Counts(made.problem, made.relaxed, lambda choices: memory_over_time(annotated, asked, made, choices))
    best = np.inf
    for choices in itertools.product(*(range(len(costs)) for costs in made.problem.node_costs)):
        cost = made.problem.evaluate(choices)
        if cost < best and counts.fits(choices):
            best = cost
    try:
        assert LimitedSession(counts, Budget(work_limit=1e9), made.start).solution.objective == pytest.approx(best)
    except InfeasibleError:
        assert best == np.inf


def with_least_staging(made: Formulation, choices: tuple[int, ...]) -> list[int]:
    """The same plan, with no more staged for the step than it needs."""
    found, problem = list(choices), made.problem
    hub = problem.node_names.index("staged for the step")
    allowed = lambda state: np.isfinite(problem.evaluate([*found[:hub], state, *found[hub + 1 :]]))  # noqa: E731
    found[hub] = next(filter(allowed, range(len(problem.node_costs[hub]))))
    return found


@pytest.mark.parametrize("train", [True, False])
def test_every_plan_is_between_the_estimates_and_costs_what_the_problem_says(train: bool) -> None:
    """With attention, views, and blocks that are recomputed."""
    graph, on, away = trace(Model(), (torch.randint(0, 12, (4, 4)),), train=train), parse_mesh("a=2"), set()
    annotated, asked = annotate(graph, on), constraints_of(graph, on, memory_limit=10**9, optimizer="adam", offload=True)
    made = formulate(annotated, asked)
    assert made.relaxed is not None
    runs = sorted(made.times.values())
    for seed in range(4):
        choices = with_least_staging(made, random_choices(made, seed))
        held = memory_over_time(annotated, asked, made, choices)
        low, high = (usage(problem, choices, len(held)) for problem in (made.relaxed, made.problem))
        ran = held[runs] > 0  # a second run that does not happen holds nothing
        assert (low[runs] <= held[runs] + 1e-6)[ran].all(), f"seed {seed}"
        assert (held[runs] <= high[runs] + 1e-6)[ran].all(), f"seed {seed}"
        plan = write_plan(annotated, _decision(graph, made, choices), made.price, made.unit, None, asked.optimizer)
        assert plan.objective == pytest.approx(made.problem.evaluate(choices))
        away |= {one.kind for one in plan.offloaded}
    assert away == ({"optimizer", "parameters"} if train else {"parameters"})


def test_without_a_limit_that_binds_nothing_is_on_the_host() -> None:
    free = planned(None)
    assert not free.offloaded and not planned(10**9).offloaded and planned(10**9).objective == free.objective
    tight = planned(int(0.5 * sum(free.memory.values())))
    assert tight.offloaded and ShardingPlan.from_json(tight.to_json()) == tight
    assert "on the host" in str(tight) and "on the host" in str(fxshard.diff(free, tight))
    changes = fxshard.diff(free, tight).differences()
    assert sum(changes.values()) == pytest.approx(tight.objective - free.objective)
    again = planned(None, pins=tight, offload=False)
    assert again.offloaded == tight.offloaded and again.objective <= tight.objective  # without the limit, nothing is gathered twice


def test_errors() -> None:
    with pytest.raises(OptionError, match="unknown offload 'optimiser'; did you mean 'optimizer'"):
        planned(1000, "optimiser")
    slow = Mesh({"a": 2}, replace(TOY, host=None))
    with pytest.raises(OptionError, match="does not say how fast the link to the host is"):
        fxshard.plan(Layers(), (torch.randn(8, 4),), slow, memory_limit=1000, offload=True, cache=False)


@pytest.mark.parametrize(
    ("kinds", "ends"),
    [
        (False, "or offload=('optimizer', 'parameters') (--offload optimizer,parameters), which holds more on the host"),
        ("optimizer", "or offload='parameters' (--offload parameters), which holds more on the host"),
        (True, "an optimizer with less state, or fewer pins and input_layouts"),
    ],
)
def test_what_is_used_already_is_no_advice(kinds: Any, ends: str) -> None:
    with pytest.raises(ConstraintError, match="nothing fits in memory_limit=10") as caught:
        planned(10, kinds, pins={"*": "R"})
    assert str(caught.value.remedy).endswith(ends), caught.value.remedy
