"""Random operators on two ranks: in any layout, the masks of a mesh of one; with rng="torch", torch's own generator."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.random_plan import random_plan
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
ROWS, WIDTH = 5, 9
"""Both odd, so that two ranks divide neither."""


class Noisy(nn.Module):
    """Linear, dropout, noise, dropout: each between layers that a plan may shard."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = F.dropout(self.a(x), 0.4)
        return F.dropout(self.b(mask.sin()), 0.5) * (1 + torch.rand(WIDTH)), mask


class Brief(Noisy):
    """The same without its last dropout: Inductor takes seconds for each."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = F.dropout(self.a(x), 0.4)
        return self.b(mask.sin()) * (1 + torch.rand(WIDTH)), mask


def model_and_input(kind: type[Noisy] = Noisy) -> tuple[Noisy, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    model = kind()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model, torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("a",))


@functools.cache
def on_one(seed: int, kind: type[Noisy]) -> Any:
    """Outputs and gradients on a mesh of one, in the simulator."""
    model, x = model_and_input(kind)
    graph = trace(model, (x,))
    program = lower_plan(graph, plan_graph(graph, Mesh({"a": 1}), Request()))
    torch.manual_seed(seed)
    return simulate_program(program, program_values(program, model, (x,)))


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def sharded(model: nn.Module, x: torch.Tensor, seed: int | None, **options: Any) -> nn.Module:
    """``model``, parallelized with a random plan; ``seed`` None replicates everything."""
    plan = random_plan(model, (x,), mesh(), seed, whole_outputs=True)
    draws = [n for n in plan.nodes if n.op in ("fxshard.dropout.default", "fxshard.random.default")]
    assert seed is None or any(not layout.is_replicated for n in draws for layout in n.spec.outputs), "no draw is sharded"
    return fxshard.parallelize(model, (x,), mesh(), plan, **options)


def check(plan: int | None, kind: type[Noisy] = Noisy, **options: Any) -> None:
    model, x = model_and_input(kind)
    run = sharded(model, x, plan, **options)
    for seed in (3, 4):
        want = on_one(seed, kind)
        torch.manual_seed(seed)
        outputs = run(x)
        sum(o.sum() for o in outputs).backward()
        for have, wanted in zip(outputs, want.outputs, strict=True):
            assert torch.equal(full(have) == 0, wanted == 0), "the same masks"
            torch.testing.assert_close(full(have), wanted, rtol=1e-9, atol=1e-12)
        for name, p in run.named_parameters():
            torch.testing.assert_close(full(p.grad), want.grads[name], rtol=1e-9, atol=1e-12)
            p.grad = None


def by_inductor() -> None:
    check(2, Brief)


def plans_eagerly() -> None:
    for plan in (None, 3, 4):
        check(plan, compiler="eager")


def a_checkpoint_around_the_model_repeats_the_draw() -> None:
    model, x = model_and_input()
    run, found = sharded(model, x, 1, compiler="eager"), []
    for call in (run, lambda x: checkpoint(run, x, use_reentrant=False)):
        torch.manual_seed(3)
        outputs = call(x)
        sum(o.square().sum() for o in outputs).backward()
        found.append([*map(full, outputs), *(full(p.grad) for p in run.parameters())])
        run.zero_grad()
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def torchs_generator_on_replicas() -> None:
    model, x = model_and_input()
    run = sharded(model, x, None, compiler="eager", rng="torch")
    torch.manual_seed(0)
    first = run(x)[0].detach()
    seen = [torch.empty_like(first) for _ in range(2)]
    torch.distributed.all_gather(seen, first.contiguous())
    assert torch.equal(*seen)
    second = run(x)[0]
    torch.manual_seed(0)
    assert torch.equal(run(x)[0], first) and not torch.equal(first, second)


found, test_two_ranks = two_ranks(plans_eagerly, a_checkpoint_around_the_model_repeats_the_draw, torchs_generator_on_replicas, by_inductor)
