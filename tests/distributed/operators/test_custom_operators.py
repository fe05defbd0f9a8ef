"""Custom operators, with and without rules, and local_map regions on two ranks, through Inductor; rules that differ by rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

import fxshard
from fxshard.errors import RunError
from tests.custom_operators import Gated, register_gate
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
PINS = {"up.*": "S(0)", "scale": "S(0)", "gate": "S(2)", "getitem": "S(2)"}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def sharded_and_whole() -> None:
    """The operator gets its rules between the two models: code compiled for the first is not reused for the second."""
    for pins in (None, PINS):
        if pins:
            register_gate()  # in a process of its own: no other test sees them
        torch.manual_seed(0)
        model, x = Gated(), torch.randn(5, 3, 6)
        reference = copy.deepcopy(model)
        plan = fxshard.plan(model, (x,), mesh(), pins=pins, input_layouts="R", output_layouts="R")
        assert [node for node, _ in plan.fallbacks] == ([] if pins else ["gate", "gate_backward"])
        assert str(plan.specs["gate_backward"]) == ("S(2), S(2), S(0) -> S(2), S(0)" if pins else "R, R, R -> R, R")
        fxshard.parallelize(model, (x,), mesh(), plan)
        train(model, reference, x)


def train(model: torch.nn.Module, reference: torch.nn.Module, x: torch.Tensor) -> None:
    ours, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(2):
        have, want = model(x), reference(x)
        close(have, want)
        have.square().mean().backward()
        want.square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            close(p.grad, q.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p, q)


def close(have: Any, want: torch.Tensor) -> None:
    whole = have.full_tensor() if isinstance(have, DTensor) else have
    torch.testing.assert_close(whole.detach(), want.detach(), rtol=1e-5, atol=1e-6)


def as_backend() -> None:
    """Uses the rules that ``sharded_and_whole``, which runs before it, registered."""
    model, x = Gated(), torch.randn(5, 3, 6)
    reference = copy.deepcopy(model)
    train(torch.compile(model, backend="fxshard", options={"mesh": mesh(), "compiler": "eager"}), reference, x)


def rules_on_one_rank_only() -> None:
    """The ranks compare rules before planning, so that none waits for a collective."""
    if dist.get_rank() == 1:
        fxshard.register_rule("tests::gate", "b s! h, h -> b s! h", override=True, linear=[[1]])
    model, x = Gated(), torch.randn(5, 3, 6)
    held = r"rank 0: b s h, h -> b s h; rank 1: b s! h, h -> b s! h, linear=\[\[1\]\]"
    said = rf"differ in the rule of tests\.gate\.default: {held}(.|\n)*the same rules on all ranks"
    with pytest.raises(RunError, match=said):
        fxshard.parallelize(model, (x,), mesh(), compiler="eager")
    with pytest.raises(RunError, match=said):
        torch.compile(model, backend="fxshard", options={"mesh": mesh(), "compiler": "eager"})(x)


class Mapped(torch.nn.Module):
    """A local_map function between two layers; the model holds the mesh."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        super().__init__()
        self.up, self.scale = torch.nn.Linear(6, 8), torch.nn.Parameter(torch.rand(8))
        cut, whole, pending = [Shard(0)], [Replicate()], [Partial()]
        self.mapped = local_map(self.gated, cut, (cut, whole), (cut, pending), device_mesh)

    @staticmethod
    def gated(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mapped(self.up(x), self.scale).sin()


def a_local_map_region() -> None:
    """The region has the placements that local_map was given. The reference runs the same function on plain tensors."""
    model, x = Mapped(mesh()), torch.randn(4, 3, 6)
    reference = Mapped(mesh())
    reference.load_state_dict(model.state_dict())
    plan = fxshard.plan(model, (x,), mesh(), input_layouts="R", output_layouts="R")
    assert str(plan.specs["to_local"]) == "S(0) -> R" and str(plan.specs["from_local"]) == "R -> S(0)"
    fxshard.parallelize(model, (x,), mesh(), plan)
    train(model, reference, x)


found, test_two_ranks = two_ranks(sharded_and_whole, as_backend, a_local_map_region, rules_on_one_rank_only)
