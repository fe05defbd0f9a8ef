"""Training with state and parameters on the host gives what one device gives, and checkpoints hold whole tensors."""

from __future__ import annotations

import copy
import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.mesh.mesh import Mesh
from fxshard.ops.host import counting
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.offload import KINDS
from fxshard.runtime.calls.settings import Planner
from fxshard.runtime.rank_graph.memory import program_memory
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from tests.distributed.scenarios import run_scenarios

pytestmark = pytest.mark.distributed

STEPS = 3
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
}
PLANNED = {"sgd": "sgd_momentum", "adamw": "adamw"}
LAYOUTS = {"input_layouts": "S(0)", "pins": {"layers.*.weight": "S(0)", "*.bias": "R", "norm.weight": "R"}}
AWAY = ("layers.0.0.weight", "layers.0.0.bias", "layers.1.2.weight", "norm.weight")
"""The parameters on the host: sharded and whole ones, of which the first layer's bias is read in the forward only."""


class Model(nn.Module):
    """Blocks, so that some of them may be recomputed, and a norm, whose parameters are small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16, bias=False)) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x.square().mean()


def made() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model().double(), torch.randn(4, 16, dtype=torch.float64)


def planner(kind: str) -> Planner:
    """Plans with these parameters on the host, without a limit that would ask for it."""
    return lambda graph, mesh, request, dump: plan_graph(graph, mesh, replace(request, offload=dict.fromkeys(AWAY, kind)), dump)


def trained(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def on_this_rank(kind: str, optimizer: str, compiler: str) -> None:
    """Two steps, a checkpoint, one more; then the same step again from the checkpoint."""
    (model, x), (one, _) = made(), made()
    want = OPTIMIZERS[optimizer](one.parameters())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    options = {"planner": planner(kind), "optimizer": PLANNED[optimizer], "compiler": compiler, **LAYOUTS}
    sharded = fxshard.parallelize(model, (x,), mesh, **options)
    (program,) = sharded.forward.programs
    offloaded = program.plan.offloaded
    assert {program.plan.called(one.node): one.kind for one in offloaded} == dict.fromkeys(AWAY, kind)
    have = OPTIMIZERS[optimizer](sharded.parameters())
    losses = trained(sharded, x, have, 2)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    fxshard.save_checkpoint(Path(folder[0]) / "saved", sharded, optimizer=have)
    with counting() as traffic:
        losses += trained(sharded, x, have, 1)
    assert (traffic.inward, traffic.outward) == tuple(sum(getattr(one, way) for one in offloaded) for way in ("inward", "outward"))
    for loss, expected in zip(losses, trained(one, x, want), strict=True):
        assert abs(loss - expected) <= 1e-9 * abs(expected)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).full_tensor(), parameter, rtol=1e-9, atol=1e-12)
    fxshard.load_checkpoint(Path(folder[0]) / "saved", sharded, optimizer=have)
    assert abs(trained(sharded, x, have, 1)[0] - losses[-1]) <= 1e-9 * abs(losses[-1])
    alone, _ = made()
    fxshard.load_checkpoint(Path(folder[0]) / "saved", alone, optimizer=(state := OPTIMIZERS[optimizer](alone.parameters())))
    assert abs(trained(alone, x, state, 1)[0] - losses[-1]) <= 1e-9 * abs(losses[-1])
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), alone(x), rtol=1e-9, atol=1e-12)


CASES = [(kind, optimizer, "eager") for kind in KINDS for optimizer in OPTIMIZERS] + [("parameters", "adamw", "inductor")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    scenarios = {"-".join(case): functools.partial(on_this_rank, *case) for case in CASES}
    return run_scenarios(scenarios, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_ranks(case: tuple[str, str, str], found: dict[str, str]) -> None:
    assert not found["-".join(case)], found["-".join(case)]


@pytest.mark.parametrize("kind", KINDS)
def test_simulated(kind: str) -> None:
    """The gradients of all ranks in one process, and the memory of a rank's graph, without what is on the host."""
    model, x = made()
    graph, mesh = trace(model, (x,)), Mesh({"a": 2}, "h100")
    asked = Request(optimizer="adamw", cache=False, **LAYOUTS)
    free = lower_plan(graph, plan_graph(graph, mesh, asked))
    program = lower_plan(graph, planner(kind)(graph, mesh, asked, None))
    with counting() as traffic:
        found = simulate_program(program, program_values(program, model, (x,)))
    one = copy.deepcopy(model)
    loss = one(x)
    loss.backward()
    torch.testing.assert_close(found.outputs, loss.detach(), rtol=1e-9, atol=1e-12)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    fetched = {"optimizer": 0, "parameters": 1}[kind] * (2 * (512 / 2 + 512 / 2 + 16) + 32)
    assert traffic.inward == 2 * 8 * fetched and not traffic.outward
    held, away = program_memory(free, "adamw"), program_memory(program, "adamw")
    state, weight = 8 * (512 / 2 + 512 / 2 + 16 + 32), {"optimizer": 2, "parameters": 3}[kind]
    assert held.static["optimizer"] - away.static["optimizer"] == 2 * state
    assert sum(held.by_kind(0).values()) - sum(away.by_kind(0).values()) >= weight * state - 8 * 512
