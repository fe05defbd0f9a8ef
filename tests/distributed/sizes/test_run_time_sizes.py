"""Sizes and numbers that depend on data, on two ranks, with random plans that shard the tensors they come from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard.runtime.compile.compile
from fxshard.errors import RunError
from fxshard.testing import random_plan
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed
ROWS = 5
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "masked select": lambda y: y[y > 0].exp().sum(),
    "a mask that is larger": lambda y: torch.masked_select(y[0], y > 0).square().sum(),
    "some rows": lambda y: F.group_norm(y[y.sum(-1) > 0], 2).sin().sum(),
    "places": lambda y: y.sum() * y.nonzero().shape[0],
    "different values": lambda y: y.square().sum() * torch.unique(y.detach().round()).shape[0],
    "a number": lambda y: (y * y.detach().sum().item()).sum(),
}
COMPILED = ("masked select", "a mask that is larger", "some rows")
"""These go through Inductor, the others run eagerly."""


class Scored(torch.nn.Module):
    """A linear layer and a score of its output."""

    def __init__(self, score: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.score = torch.nn.Linear(6, 4, dtype=torch.float64), score

    def forward(self, x: torch.Tensor) -> Any:
        return self.score(self.layer(x))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step_equals_one_device(name: str, compiler: str) -> None:
    """Each batch selects another number of elements."""
    model = Scored(SCORES[name])
    reference = copy.deepcopy(model)
    plan = random_plan(model, (inputs(0),), mesh(), seed=2, whole_outputs=True)
    assert plan.collectives
    fxshard.parallelize(model, (inputs(0),), mesh(), plan, compiler=compiler)
    for seed in range(3):
        have, want = model(inputs(seed)), reference(inputs(seed))
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
        for loss, owner in ((have, model), (want, reference)):
            owner.zero_grad()
            loss.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-9)


def trains_by_inductor() -> None:
    for name in COMPILED:
        step_equals_one_device(name, "inductor")


def trains_eagerly() -> None:
    for name in [name for name in SCORES if name not in COMPILED]:
        step_equals_one_device(name, "eager")


def as_backend() -> None:
    """By default Dynamo breaks the graph at data-dependent sizes; fxshard runs the parts before and after."""
    model = Scored(SCORES["masked select"])
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fxshard", options={"mesh": mesh(), "compiler": "eager"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(inputs(1)), reference(inputs(1)), rtol=1e-9, atol=1e-9)


def an_inductor_failure_is_an_error() -> None:
    """Inductor of torch 2.13 cannot compile some graphs with data-dependent sizes, such as a matmul with unknown columns."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no order of unknown strides")

    model = Scored(SCORES["masked select"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fxshard.runtime.compile.compile, "inductor_compile", refuse)
        with pytest.raises(RunError, match=r'Inductor could not compile .*: no order of unknown strides(.|\n)*compiler="eager"'):
            fxshard.parallelize(model, (inputs(0),), mesh())(inputs(0))


found, test_two_ranks = two_ranks(trains_by_inductor, trains_eagerly, as_backend, an_inductor_failure_is_an_error)
