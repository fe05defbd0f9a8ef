"""A plan keeps a memory limit that it reaches exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fxshard
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.planning.choose import keeps_limit
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.trace.trace import trace
from fxshard.solver import solve
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import from_problem
from fxshard.solver.solve import _starts


def test_the_limit_itself_is_allowed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    free = fxshard.plan(model, (torch.randn(4, 8),), fxshard.Mesh({"a": 2}), cache=False)
    needed = sum(free.memory.values())
    assert keeps_limit(free) and keeps_limit(replace(free, memory_limit=needed))
    assert not keeps_limit(replace(free, memory_limit=needed - 1))
    within = fxshard.plan(model, (torch.randn(4, 8),), fxshard.Mesh({"a": 2}), memory_limit=needed, cache=False)
    assert within.objective == free.objective


def test_the_search_starts_from_the_plan_without_the_limit() -> None:
    """Its specs and results. Values are saved as they are produced, so that some may be gathered twice; improved, it costs as much."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
    graph = trace(model, (torch.randn(16, 8, requires_grad=True),))
    annotated = annotate(graph, fxshard.Mesh({"a": 2}))
    free = formulate(annotated, Constraints())
    best = solve(free.problem)
    limited = formulate(annotated, Constraints(memory_limit=10**9))
    started = limited.starting_from(free, best.choices)
    assert limited.kept and started.start != limited.start
    for name, (var, specs) in started.node_vars.items():
        its, options = free.node_vars[name]
        assert specs[started.start[var]] == options[best.choices[its]]
    assert best.objective <= limited.problem.evaluate(started.start) < np.inf
    _, improved = _starts(from_problem(limited.problem), started.start, Budget())
    assert improved is not None and limited.problem.evaluate(improved) == pytest.approx(best.objective, rel=1e-9)
