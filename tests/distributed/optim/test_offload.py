"""Training with state and parameters on the host gives what one device gives, and checkpoints hold whole tensors."""

from __future__ import annotations

import copy
import functools
import tempfile
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
SHARES = {"optimizer": 0.65, "parameters": 0.6}
"""Part of the memory without a limit that the limit leaves."""


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


def limit_of(model: Model, x: torch.Tensor, kind: str, optimizer: str) -> int:
    free = fxshard.plan(model, (x,), Mesh({"a": 2}, "h100"), optimizer=PLANNED[optimizer], cache=False)
    return int(SHARES[kind] * sum(free.memory.values()))


PLANNED = {"sgd": "sgd_momentum", "adamw": "adamw"}


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
    limit = limit_of(model, x, kind, optimizer)
    want = OPTIMIZERS[optimizer](one.parameters())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    options = {"hardware": "h100", "memory_limit": limit, "optimizer": PLANNED[optimizer], "offload": kind, "compiler": compiler}
    sharded = fxshard.parallelize(model, (x,), mesh, **options)
    (program,) = sharded.forward.programs
    offloaded = program.plan.offloaded
    assert offloaded and {one.kind for one in offloaded} == {kind}
    have = OPTIMIZERS[optimizer](sharded.parameters())
    losses = trained(sharded, x, have, 2)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    fxshard.save_checkpoint(sharded, Path(folder[0]) / "saved", optimizer=have)
    with counting() as traffic:
        losses += trained(sharded, x, have, 1)
    assert (traffic.inward, traffic.outward) == tuple(sum(getattr(one, way) for one in offloaded) for way in ("inward", "outward"))
    for loss, expected in zip(losses, trained(one, x, want), strict=True):
        assert abs(loss - expected) <= 1e-9 * abs(expected)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(sharded.get_parameter(name).full_tensor(), parameter, rtol=1e-9, atol=1e-12)
    fxshard.load_checkpoint(sharded, Path(folder[0]) / "saved", optimizer=have)
    assert abs(trained(sharded, x, have, 1)[0] - losses[-1]) <= 1e-9 * abs(losses[-1])
    alone, _ = made()
    fxshard.load_checkpoint(alone, Path(folder[0]) / "saved", optimizer=(state := OPTIMIZERS[optimizer](alone.parameters())))
    assert abs(trained(alone, x, state, 1)[0] - losses[-1]) <= 1e-9 * abs(losses[-1])
    with torch.no_grad():
        torch.testing.assert_close(sharded(x), alone(x), rtol=1e-9, atol=1e-12)


CASES = [(kind, optimizer, "eager") for kind in SHARES for optimizer in OPTIMIZERS] + [("parameters", "adamw", "inductor")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    scenarios = {"-".join(case): functools.partial(on_this_rank, *case) for case in CASES}
    return run_scenarios(scenarios, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_ranks(case: tuple[str, str, str], found: dict[str, str]) -> None:
    assert not found["-".join(case)], found["-".join(case)]


@pytest.mark.parametrize("kind", SHARES)
def test_simulated(kind: str) -> None:
    """Gradients of all ranks in one process; the memory of a rank's graph stays within the limit."""
    model, x = made()
    graph, mesh = trace(model, (x,)), Mesh({"a": 2}, "h100")
    limit = limit_of(model, x, kind, "adamw")
    plan = plan_graph(graph, mesh, Request(memory_limit=limit, optimizer="adamw", offload=kind, cache=False))
    program = lower_plan(graph, plan)
    found = simulate_program(program, program_values(program, model, (x,)))
    loss = copy.deepcopy(model)(x)
    torch.testing.assert_close(found.outputs, loss.detach(), rtol=1e-9, atol=1e-12)
    one = copy.deepcopy(model)
    one(x).backward()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad, rtol=1e-9, atol=1e-12)
    assert program_memory(program, "adamw").peak <= limit + 8
