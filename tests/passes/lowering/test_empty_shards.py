"""Empty shards: every spec of every node, in graphs with dims smaller than the mesh, gives the results of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxshard.layout.layouts import local_shape
from fxshard.layout.redistribution import bytes_price
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.planning.choose import Decision, write_plan
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.slices import diagonal


class Apply(nn.Module):
    """A function of the inputs."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def rows(*shape: int) -> torch.Tensor:
    """Negative values only, so that a wrong zero from an empty shard would be the maximum."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) % 7 - 9).contiguous()


IMAGE = (2, 2, 6, 6)
CASES: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "sum": lambda: (Apply(lambda x: x.sum(0)), (rows(5, 2),)),
    "sum of all": lambda: (Apply(lambda x: x.sum()), (rows(5, 2),)),
    "mean": lambda: (Apply(lambda x: x.mean(0)), (rows(5, 2),)),
    "amax": lambda: (Apply(lambda x: x.amax(0)), (rows(5, 2),)),
    "amin": lambda: (Apply(lambda x: (-x).amin(0)), (rows(5, 2),)),
    "max of integers": lambda: (Apply(lambda x: x.amax(0)), (rows(5, 2).long(),)),
    "prod": lambda: (Apply(lambda x: x.prod(0)), (rows(5, 2),)),
    "prod of all": lambda: (Apply(lambda x: x.prod()), (rows(5, 2),)),
    "any": lambda: (Apply(lambda x: (x > -8).any(0)), (rows(5, 2),)),
    "all": lambda: (Apply(lambda x: (x < 0).all(0)), (rows(5, 2),)),
    "softmax": lambda: (Apply(lambda x: x.softmax(-1)), (rows(5, 3),)),
    "variance": lambda: (Apply(lambda x: x.var(0)), (rows(5, 2),)),
    "max pool": lambda: (Apply(lambda x: F.max_pool2d(x, 2)), (rows(*IMAGE),)),
    "convolution": lambda: (nn.Conv2d(2, 3, 3, dtype=torch.float64), (rows(*IMAGE),)),
    "layer norm": lambda: (nn.LayerNorm(3, dtype=torch.float64), (rows(5, 2, 3),)),
    "batch norm": lambda: (nn.BatchNorm1d(3, dtype=torch.float64), (rows(5, 3),)),
    "linear": lambda: (nn.Linear(3, 2, dtype=torch.float64), (rows(5, 3),)),
    "embedding": lambda: (nn.Embedding(3, 5, dtype=torch.float64), (torch.tensor([[0, 2, 1], [2, 2, 0]]),)),
    "cross entropy": lambda: (Apply(F.cross_entropy), (rows(5, 3), torch.tensor([0, 2, 1, 1, 0]))),
    "cat": lambda: (Apply(lambda x, y: torch.cat([x, y])), (rows(2, 3), rows(3, 3))),
}


@pytest.mark.parametrize(("name", "axes"), diagonal([*CASES], [{"a": 4}, {"a": 2, "b": 3}]))
def test_every_spec_of_every_node(name: str, axes: dict[str, int]) -> None:
    """On two axes these are too many, so random plans are tested. Floating-point inputs have gradients."""
    torch.manual_seed(0)
    model, args = CASES[name]()
    args = tuple(a.requires_grad_() if a.is_floating_point() and name not in ("any", "all") else a for a in args)
    train = any(p.requires_grad for p in (*model.parameters(), *args)) and copy.deepcopy(model)(*args).requires_grad
    graph, mesh, reference = trace(model, args, train=train), Mesh(axes), one_device(model, args, train=train)
    inputs = _input_gradients(model, args)
    annotated = annotate(graph, mesh)
    base = random_graph_plan(annotated, 0)
    if len(axes) > 1:
        plans = [random_graph_plan(annotated, seed) for seed in range(10)]
    else:
        every = [(n, spec) for n in annotated.calls for spec in annotated.specs[n]]
        plans = [_with(base, n, spec, annotated) for n, spec in every]
    empty = 0
    for plan in plans:
        empty += _has_empty_shard(plan)
        program = lower(graph, plan)
        result = simulate_program(program, program_values(program, model, args))
        assert_equal_to_one_device(result, reference)
        for k, gradient in inputs.items():
            torch.testing.assert_close(result.grads[f"args[{k}]"], gradient, rtol=1e-9, atol=1e-12)
    assert empty, "no plan has an empty shard"


def _input_gradients(model: nn.Module, args: tuple[torch.Tensor, ...]) -> dict[int, torch.Tensor]:
    wanted = {k: a for k, a in enumerate(args) if a.requires_grad}
    out = copy.deepcopy(model)(*args)
    return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), torch.ones_like(out)), strict=True)) if wanted else {}


def _with(base: ShardingPlan, name: str, spec: OpSpec, annotated: Annotated) -> ShardingPlan:
    return write_plan(annotated, Decision({**base.specs, name: spec}), bytes_price, "bytes")


def _has_empty_shard(plan: ShardingPlan) -> bool:
    last = tuple(n - 1 for n in plan.mesh.shape)
    pairs = [pair for n in plan.nodes for pair in zip(n.shapes, n.spec.outputs, strict=False)]
    pairs += [(m.shape, m.target) for m in plan.redistributions]
    return any(0 in local_shape(shape, layout, plan.mesh.shape, last) for shape, layout in pairs)
