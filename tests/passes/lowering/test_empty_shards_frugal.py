"""Plans that recompute or gather again, with empty shards. All ranks must agree where the backward begins."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import lower_plan
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.slices import diagonal


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos() @ x.sin().t()


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()


@pytest.mark.parametrize(("make", "mesh", "rows"), diagonal([Twice, perceptron], [{"a": 3}, {"a": 2, "b": 3}], [2, 4]))
def test_frugal_plans_equal_one_device(make: Callable[[], nn.Module], mesh: dict[str, int], rows: int) -> None:
    model, x = make(), torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    graph = trace(model, (x,))
    annotated = annotate(graph, Mesh(mesh))
    want = one_device(copy.deepcopy(model), (x,), {})
    for seed in range(6):
        program = lower_plan(graph, random_graph_plan(annotated, seed, frugal=True))
        assert_equal_to_one_device(simulate_program(program, program_values(program, model, (x,))), want)
