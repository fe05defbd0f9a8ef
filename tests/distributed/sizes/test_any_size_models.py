"""The models of the sweep at ten sizes each, on two ranks, forward and backward: the solver's plan through Inductor, with a fixed number
of programs, and random plans."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.module.module import parallelize
from fxshard.testing.random_plan import random_graph_plan
from tests.distributed.scenarios import run_scenarios
from tests.distributed.training import objective
from tests.models.any_size import DYNAMIC, SIZES, case, resized

pytestmark = pytest.mark.distributed
PROGRAMS = 3
"""One for the first sizes, one for sizes that shard evenly, one for all."""
BRANCHES = {"gpt2": 2, "bert": 1, "t5": 1}
"""More programs, as model code branches on sizes: length 1 needs no causal mask, batch 1 equals that of the position ids."""


def step(model: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and whole gradients of one step; ``model`` has no gradients afterwards."""
    loss = objective([x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)])
    loss.backward()
    grads = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def random_planner(seed: int) -> Any:
    """A planner that makes a random plan and leaves pinned inputs and parameters in their layouts."""

    def planned(graph: PlanningGraph, mesh: Mesh, request: Request, dump: Any = None) -> ShardingPlan:
        names = {end.name for end in graph.inputs}
        pinned = {name: layout for name, layout in dict(request.pins).items() if name in names}
        known = {name: Layout(one.values()) if isinstance(one, Mapping) else one for name, one in pinned.items()}  # DTensors' are by axis
        return random_graph_plan(annotate(graph, mesh), seed, whole_outputs=True, inputs=known)

    return planned


def ten_sizes(name: str, seed: int | None = None, compiler: str = "inductor") -> None:
    """Checks ten sizes with the solver's plan or, given a ``seed``, with a random plan for each program."""
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    model, args, kwargs = case(name, own_precision=False)
    model = model.float()
    single = copy.deepcopy(model)
    first = _float(resized(name, args, kwargs, 4, 8))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    options = {"input_layouts": "S(0)"} if seed is None else {"planner": random_planner(seed)}
    sharded: Any = parallelize(model, first[0], mesh, example_kwargs=first[1], cache=False, compiler=compiler, **options)
    counters.clear()
    for batch, seq in SIZES:
        call = _float(resized(name, args, kwargs, batch, seq))
        (loss, grads), (want, wanted) = step(sharded, *call), step(single, *call)
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6, equal_nan=True)
        noise = 1e-6 * float(torch.stack([g.norm() for g in wanted.values()]).nan_to_num().norm())
        for parameter, grad in wanted.items():
            there = grads[parameter]
            assert torch.equal(there.isnan(), grad.isnan()), f"{(batch, seq)}: {parameter} is nan at other elements than on one device"
            error, size = float((there - grad).nan_to_num().norm()), float(grad.nan_to_num().norm())
            said = f"{(batch, seq)}: {parameter} is off by {error:.3g}, its norm is {size:.3g}"
            assert error <= max(1e-5 * size, noise), said
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


def check(folder: Path, scenarios: dict[str, Callable[[], None]]) -> None:
    said = run_scenarios(scenarios, 2, folder, seconds=900)
    assert not any(said.values()), said


def test_mlp(tmp_path: Path) -> None:
    check(tmp_path, {"solver": partial(ten_sizes, "mlp"), **{f"plan {i}": partial(ten_sizes, "mlp", i, "eager") for i in range(2)}})


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in DYNAMIC if n != "mlp"])
def test_sweep(name: str, tmp_path: Path) -> None:
    check(tmp_path, {"solver": partial(ten_sizes, name)})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", DYNAMIC)
def test_random_plan(name: str, seed: int, tmp_path: Path) -> None:
    """Only the first seed goes through Inductor, which takes minutes for a random plan."""
    check(tmp_path, {"plan": partial(ten_sizes, name, seed, "eager" if seed else "inductor")})
