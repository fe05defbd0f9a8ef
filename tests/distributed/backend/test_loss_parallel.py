"""loss_parallel() of torch with compiled functions and parallelized modules: the loss and gradients of one device, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import fxshard
import fxshard.runtime.backend.backend as backend
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
OPTIONS = {"compiler": "eager", "timeout": 60.0}


class Classifier(nn.Module):
    """Logits [4, 16], or the loss, computed under ``loss_parallel`` if ``inside``."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.inside = nn.Linear(8, 8), nn.Linear(8, 16), inside

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(torch.relu(self.first(x)))
        if targets is None:
            return logits
        if not self.inside:
            return F.cross_entropy(logits, targets)
        with loss_parallel():
            return F.cross_entropy(logits, targets)


class Setting:
    """A model whose head is sharded by class, its twin on one device, inputs, and targets as a replicated DTensor."""

    def __init__(self, inside: bool = False, styles: Any = parallelize_module) -> None:
        self.mesh: DeviceMesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.single = Classifier().double()
        self.x, self.plain = torch.randn(4, 8, dtype=torch.float64), torch.tensor([1, 5, 9, 15])
        self.targets = distribute_tensor(self.plain, self.mesh, [Replicate()])
        model = Classifier(inside).double()
        model.load_state_dict(copy.deepcopy(self.single.state_dict()))
        self.model = styles(model, self.mesh, {"head": ColwiseParallel(use_local_output=False)})

    def check(self, loss: Tensor) -> None:
        want = F.cross_entropy(self.single(self.x), self.plain)
        full = lambda x: x.full_tensor() if isinstance(x, DTensor) else x  # noqa: E731
        torch.testing.assert_close(full(loss), want, rtol=1e-9, atol=1e-9)
        want.backward()
        loss.backward()
        for p, q in zip(self.model.parameters(), self.single.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-9, atol=1e-9)


def loss_outside() -> None:
    """The compiled model returns logits in the layout of its style, for which torch computes the loss in parallel."""
    one = Setting()
    one.model.compile(backend="fxshard", options=OPTIONS)
    with loss_parallel():
        logits = one.model(one.x)
        assert logits.placements == (Shard(1),)
        one.check(F.cross_entropy(logits, one.targets))


def context_around() -> None:
    """The classes stay sharded: nothing is gathered, and what is reduced has a number per row, or is a gradient of the first layer."""
    one, made = Setting(), []
    compile_program = backend.compile_program
    backend.compile_program = lambda bound, *how: made.append(bound.program) or compile_program(bound, *how)
    try:
        with loss_parallel():
            compiled = torch.compile(lambda x, t: one.model(x, t), backend="fxshard", fullgraph=True, options=OPTIONS)
            one.check(compiled(one.x, one.targets))
    finally:
        backend.compile_program = compile_program
    assert {c.kind for c in made[0].collectives} == {"all_reduce"}


def context_inside() -> None:
    one = Setting(inside=True)
    one.model.compile(backend="fxshard", fullgraph=True, options=OPTIONS)
    one.check(one.model(one.x, one.targets))


def parallelized_inside() -> None:
    one = Setting(inside=True, styles=fxshard.parallelize_module)
    one.check(one.model(one.x, one.plain))


def parallelized_outside() -> None:
    one = Setting(styles=fxshard.parallelize_module)
    with loss_parallel():
        one.check(F.cross_entropy(one.model(one.x), one.targets))


found, test_two_ranks = two_ranks(loss_outside, context_around, context_inside, parallelized_inside, parallelized_outside)
