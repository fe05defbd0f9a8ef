"""Batch norm in training over a sharded batch: results and running statistics equal one device, and no activation is communicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import SLOW
from torch import nn

from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.kernels import device_graph
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing import assert_equal_to_one_device, one_device
from tests.passes.tracing import check_eager, real, targets


class Net(nn.Module):
    """A convolution of separate patches and a batch norm."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 2, stride=2, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(6, dtype=torch.float64, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.conv(x)).relu() * 3).square()


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_every_option_equals_eager(options: dict[str, bool]) -> None:
    graph, _ = check_eager(Net(**options), real(5, 3, 4, 4, grad=False), plans=3)
    assert "fxshard.channel_spread.default" in targets(graph)
    assert not any("batch_norm" in t for t in targets(graph) if t.startswith("aten"))


@pytest.mark.parametrize("options", [{}, {"affine": False}])
def test_the_average_over_all_batches_continues(options: dict[str, bool]) -> None:
    """With ``momentum=None`` a batch has the weight of one over the number of batches so far."""
    model, x = Net(momentum=None, **options), real(5, 3, 4, 4, grad=False)
    model(real(2, 3, 4, 4, grad=False)), model(real(3, 3, 4, 4, grad=False))
    graph, result = check_eager(model, x, plans=3)
    assert set(result.mutations) == {f"norm.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")}
    assert int(result.mutations["norm.num_batches_tracked"]) == 3
    assert "fxshard.channel_spread.default" in targets(graph)


def test_instance_norm_and_eval_mode() -> None:
    check_eager(nn.InstanceNorm1d(3, affine=True, track_running_stats=True, dtype=torch.float64), real(5, 3, 4, grad=False), plans=2)
    graph, _ = check_eager(Net().eval(), real(5, 3, 4, 4, grad=False))
    assert not any(t.startswith("fxshard.") for t in targets(graph)), "nothing is summed over the batch"


@pytest.mark.parametrize("batch", [8, 5])
def test_data_parallel_training_communicates_vectors_only(batch: int) -> None:
    model, x, mesh = Net(), real(batch, 3, 4, 4, grad=False), Mesh({"dp": 4}, SLOW)
    graph = trace(model, (x,))
    pins = dict.fromkeys((end.name for end in graph.inputs_of("parameter")), "R")
    plan = plan_graph(graph, mesh, Request(input_layouts="S(0)", output_layouts="S(0)", pins=pins))
    program = lower(graph, plan)
    result = simulate_program(program, program_values(program, model, (x,), {}))
    assert_equal_to_one_device(result, one_device(model, (x,)))
    largest = max(p.numel() for p in model.parameters())
    assert all(c.kind == "all_reduce" and torch.Size(c.buffer).numel() <= largest for c in plan.collectives)


def test_a_replicated_batch_uses_torchs_variance() -> None:
    """On a device the parts are aten operators. Torch's own variance is used if no shard needs the mean of another."""
    model = nn.BatchNorm2d(6)
    graph = trace(model, (torch.randn(5, 6, 4, 4),))
    program = lower(graph, plan_graph(graph, Mesh({"dp": 2}), Request(input_layouts="R", output_layouts="R", pins={"*": "R"})))
    module = device_graph(program.local((0,)), torch.device("cpu"))
    found = {str(n.target) for n in module.graph.nodes if n.op == "call_function"}
    assert "aten.var.correction" in found
    assert not any(t.startswith("fxshard") for t in found)
