"""Random plans are legal and reach every spec that rules offer; the comparison with one device finds small errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxshard
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.annotation.verify import verify_plan
from fxshard.passes.trace.trace import trace
from fxshard.testing import assert_equal_to_one_device, one_device, random_plan
from fxshard.testing.random_plan import random_graph_plan

MESH = Mesh({"a": 2, "b": 2})


def case() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double(), (torch.randn(8, 4, dtype=torch.float64),)


def test_random_plans_are_legal_repeatable_and_reach_every_spec() -> None:
    graph = trace(*case())
    annotated = annotate(graph, Mesh({"a": 2}))
    missing = {(n, s) for n, specs in annotated.specs.items() for s in specs if not n.startswith("tangents")}
    for seed in range(60):
        plan = random_graph_plan(annotated, seed)
        verify_plan(annotated, plan)
        missing -= set(plan.specs.items())
    assert not missing
    assert random_plan(*case(), MESH, seed=5).to_json() == random_plan(*case(), MESH, seed=5).to_json()
    assert random_plan(*case(), MESH, seed=5).to_json() != random_plan(*case(), MESH, seed=6).to_json()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_compute_what_one_device_does(train: bool, seed: int) -> None:
    model, args = case()
    plan = random_plan(model, args, MESH, seed=seed, train=train)
    assert_equal_to_one_device(fxshard.simulate(model, args, plan), one_device(model, args, train=train))


def test_the_reference_does_not_change_the_model() -> None:
    model, args = case()
    before = copy.deepcopy(model.state_dict())
    reference = one_device(model, args)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and next(model.parameters()).grad is None
    assert torch.equal(reference.buffers["1.num_batches_tracked"], torch.tensor(1))
    assert set(reference.grads) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("part", ["outputs", "grads", "mutations"])
def test_an_error_in_the_ninth_digit_is_found(part: str) -> None:
    model, args = case()
    result, reference = fxshard.simulate(model, args, mesh=MESH), one_device(model, args)
    assert_equal_to_one_device(result, reference)
    if part == "outputs":
        result.outputs = result.outputs * (1 + 1e-8)
    else:
        name = "2.bias" if part == "grads" else "1.running_var"
        getattr(result, part)[name] = getattr(result, part)[name] * (1 + 1e-8)
    with pytest.raises(AssertionError, match="is off by"):
        assert_equal_to_one_device(result, reference)


@pytest.mark.parametrize(
    ("part", "name", "what"),
    [
        ("grads", "0.bias", r"no gradient for \['0.bias'\]"),
        ("mutations", "1.running_mean", r"no new value for buffers \['1.running_mean'\]"),
    ],
)
def test_missing_gradients_and_buffers_are_found(part: str, name: str, what: str) -> None:
    model, args = case()
    result = fxshard.simulate(model, args, mesh=MESH)
    del getattr(result, part)[name]
    with pytest.raises(AssertionError, match=what):
        assert_equal_to_one_device(result, one_device(model, args))


def test_unchanged_buffers_need_not_be_returned() -> None:
    model, args = case()
    model.eval()
    result, reference = fxshard.simulate(model, args, mesh=MESH), one_device(model, args)
    assert not result.mutations and not reference.changed
    assert_equal_to_one_device(result, reference)
