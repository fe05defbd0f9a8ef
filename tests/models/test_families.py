"""Model families: no operator of a joint graph only replicates, and random legal plans compute what one device computes."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache

import pytest
import torch
from torch import nn

from bench.families import BY_NAME, make, measure, summary
from bench.families.family import Case, Family
from bench.families.rows import row
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing import assert_equal_to_one_device, one_device
from fxshard.testing.compare import Reference
from fxshard.testing.random_plan import random_graph_plan

SLICE = ("perceptron", "mistral", "modernbert", "convnext", "mixtral", "mamba")
EXACT = ("autoencoder", "bert", "convolutions", "dit", "resnet", "segformer", "swin", "unet", "wav2vec2", "whisper")
"""Families that compute in the model's dtype everywhere."""
ROUNDED = ("deepseek_v3", "llama", "mamba", "mixtral", "t5")
"""Families that compute partly in float32, whatever the model's dtype: the order of additions changes the seventh digit."""


@pytest.mark.parametrize("name", SLICE)
def test_no_operator_falls_back(name: str) -> None:
    (found,) = measure([name])
    assert not found.reason
    assert found.nodes > 20 and not found.fallbacks


@lru_cache(maxsize=1)
def prepared(name: str) -> tuple[Case, PlanningGraph, Reference]:
    """The case, its graph, and the results of one device, where experts run one by one with plain matmuls."""
    model, args, kwargs = make(name)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation("eager")
    return (model, args, kwargs), trace(model, args, kwargs), one_device(plain, args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2"])
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_random_plans_equal_one_device(mesh: str, name: str) -> None:
    (model, args, kwargs), graph, reference = prepared(name)
    annotated = annotate(graph, parse_mesh(mesh))
    for seed in range(2):
        program = lower(graph, random_graph_plan(annotated, seed))
        result = simulate_program(program, program_values(program, model, args, kwargs))
        assert_equal_to_one_device(result, reference, rtol=1e-9 if name in EXACT else 1e-5)


def test_there_are_at_least_thirty_families_and_every_kind() -> None:
    assert len(BY_NAME) >= 30
    kinds = {"own", "decoder", "encoder", "encoder-decoder", "vision", "audio", "mixture of experts", "state space", "diffusion"}
    assert {family.kind for family in BY_NAME.values()} == kinds


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Pooled(nn.Module):
    """One operator has no rule at all, and one has none in DTensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.test_families.mystery(nn.functional.avg_pool2d(x, 2))


def _mystery(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_fallbacks_are_counted() -> None:
    operator = torch.library.custom_op("test_families::mystery", _mystery, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_fake(_mystery)
    operator.register_autograd(lambda _, grad: grad)

    def family(model: nn.Module) -> Family:
        def build(_: bool) -> Case:
            return model, (torch.randn(2, 3, 4, 4, requires_grad=True),), {}

        return Family("one", "own", build)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [row(family(Pooled())), row(family(Branching()))]
    assert rows[0].fallbacks == ("test_families.mystery.default",)
    assert rows[0].dtensor == ("aten.avg_pool2d_backward.default", "test_families.mystery.default")
    assert "x if x.sum() > 0" in rows[1].reason
    assert "1 of 2 families have a joint graph" in summary(rows)
    assert "replicated because they have no rule: 1 test_families.mystery.default" in summary(rows)
