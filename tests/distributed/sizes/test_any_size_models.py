"""The models of the sweep on two ranks through Inductor, ten sizes each, forward and backward: a fixed number of programs."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.module.module import parallelize
from tests.distributed.scenarios import run_scenarios
from tests.distributed.training import objective
from tests.models.any_size import DYNAMIC, SIZES, case, resized

pytestmark = pytest.mark.distributed
PROGRAMS = 3
"""One for the first sizes, one for even ones, one for all."""
BRANCHES = {"gpt2": 2, "bert": 1, "t5": 1}
"""How many of the sizes take another branch in the model's own code: a length of 1 is not causal, a batch of 1 is that of the positions."""


def step(model: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the parameters' whole gradients, which are dropped."""
    loss = objective([x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)])
    loss.backward()
    grads = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def ten_sizes(name: str) -> None:
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    model, args, kwargs = case(name)
    model = model.float()
    single = copy.deepcopy(model)
    first = _float(resized(name, args, kwargs, 4, 8))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    sharded: Any = parallelize(model, first[0], mesh, example_kwargs=first[1], input_layouts="S(0)", cache=False)
    counters.clear()
    for batch, seq in SIZES:
        call = _float(resized(name, args, kwargs, batch, seq))
        (loss, grads), (want, wanted) = step(sharded, *call), step(single, *call)
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6, equal_nan=True)
        noise = 1e-6 * float(torch.stack([g.norm() for g in wanted.values()]).norm())
        for parameter, grad in wanted.items():
            error, size = float((grads[parameter] - grad).norm()), float(grad.norm())
            said = f"{(batch, seq)}: {parameter} is off by {error:.3g}, its norm is {size:.3g}"
            assert error <= max(1e-5 * size, noise) or (size != size and bool(grads[parameter].isnan().any())), said
    made, most = sharded.forward.programs, PROGRAMS + BRANCHES.get(name, 0)
    compiled = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]
    said = f"{len(made)} programs, {compiled} graphs compiled: {list(map(_said, made))}"
    assert len(made) <= most and compiled <= 2 * (most - 1), said


def _said(program: ShardedProgram) -> str:
    return f"{program.sizes} {list(map(str, program.guards))}"


def _float(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    def one(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    return tuple(map(one, call[0])), {key: one(value) for key, value in call[1].items()}


def check(name: str, folder: Path) -> None:
    said = run_scenarios({name: functools.partial(ten_sizes, name)}, 2, folder, seconds=900)
    assert not said[name], said[name]


def test_mlp(tmp_path: Path) -> None:
    check("mlp", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in DYNAMIC if n != "mlp"])
def test_sweep(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
