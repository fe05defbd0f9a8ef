"""One program for every size of a dim: many operators on uneven, one-row and empty shards, compared with one device."""

from __future__ import annotations

import copy
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.shapes import dynamic_dims
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.passes.lowering.test_empty_shards import Apply, rows
from tests.slices import diagonal


def attention(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (x, x.cos(), x.sin()))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "sum": (lambda: Apply(lambda x: x.sum(0)), (2,)),
    "sum of all": (lambda: Apply(lambda x: x.sum()), (2,)),
    "mean": (lambda: Apply(lambda x: x.mean(0)), (2,)),
    "amax": (lambda: Apply(lambda x: x.amax(0)), (2,)),
    "amin": (lambda: Apply(lambda x: (-x).amin(0)), (2,)),
    "prod": (lambda: Apply(lambda x: (x / 9).prod(0)), (2,)),
    "any": (lambda: Apply(lambda x: (x > -8).any(0) * x.sum()), (2,)),
    "all": (lambda: Apply(lambda x: (x < 0).all(0) * x.sum()), (2,)),
    "softmax": (lambda: Apply(lambda x: x.softmax(0)), (3,)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3, dtype=torch.float64), (2, 6, 6)),
    "max pool": (lambda: Apply(lambda x: F.max_pool2d(x, 2)), (2, 6, 6)),
    "layer norm": (lambda: nn.LayerNorm(3, dtype=torch.float64), (2, 3)),
    "linear": (lambda: nn.Linear(3, 2, dtype=torch.float64), (3,)),
    "cat": (lambda: Apply(lambda x: torch.cat([x, x.cos()])), (3,)),
    "cumulative": (lambda: Apply(lambda x: x.cumsum(0)), (3,)),
    "attention of a batch": (lambda: Apply(attention), (3, 8)),
    "attention over a length": (lambda: Apply(lambda x: attention(x[None])[0]), (8,)),
    "reversed": (lambda: Apply(lambda x: x.flip(0)), (3,)),
    "flattened": (lambda: Apply(lambda x: x.reshape(-1).cos()), (3,)),
    "standard deviation": (lambda: Apply(lambda x: x.var(0, correction=0)), (3,)),
    "rolled": (lambda: Apply(lambda x: x.roll(1, 1)), (3,)),
    "cumulative maximum": (lambda: Apply(lambda x: x.cummax(1)[0]), (3,)),
    "cumulative product": (lambda: Apply(lambda x: (x / 9).cumprod(1)), (3,)),
    "logarithm of a sum": (lambda: Apply(lambda x: x.logsumexp(1)), (3,)),
    "distances": (lambda: Apply(lambda x: torch.cdist(x, x + 1)), (2, 3)),
    "solved": (lambda: Apply(lambda x: torch.linalg.solve(x + 99 * torch.eye(3, dtype=x.dtype), x.cos())), (3, 3)),
    "circular padding": (lambda: Apply(lambda x: F.pad(x[:, None], (1, 1), mode="circular")), (3,)),
}
ASKED = ("prod", "cumulative")
"""Operators whose derivative asks, in torch's C++ code, whether there is only one element: a guard."""
MESHES = ({"a": 2}, {"a": 3}, {"a": 2, "b": 2})


@lru_cache(maxsize=1)
def traced(name: str) -> tuple[nn.Module, PlanningGraph]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, args = make(), (rows(7, *shape).requires_grad_(),)
    dims = tuple(replace(d, uneven=True) for d in dynamic_dims(model, args, {}, ({0: "n"},)))
    return model, trace(model, args, dynamic=dims)


@pytest.mark.parametrize(("name", "axes", "seed"), diagonal([*CASES], MESHES, range(4)))
def test_every_size(name: str, axes: dict[str, int], seed: int) -> None:
    """Torch's kernels ask whether a shard has elements. The answer does not change their result, so it makes no guard."""
    model, graph = traced(name)
    program = lower_plan(graph, random_graph_plan(annotate(graph, Mesh(axes)), seed))
    for size in (1, 2 + zlib.crc32(name.encode()) % 12):
        args = (rows(size, *CASES[name][1]).requires_grad_(),)
        sizes = sizes_of_call(program, args, {})
        if name in ASKED and size == 1:
            assert "n != 1" in str(program.refuses(sizes))
            continue
        assert program.refuses(sizes) is None, program.guards
        at = program_at(program, sizes)
        result = simulate_program(at, program_values(at, model, args))
        assert_equal_to_one_device(result, one_device(copy.deepcopy(model), args))
        out = model(*args)
        (gradient,) = torch.autograd.grad(out, args, torch.ones_like(out))
        torch.testing.assert_close(result.grads["args[0]"], gradient, rtol=1e-9, atol=1e-12)


def test_an_example_of_one_row_is_sharded_like_larger_ones() -> None:
    """A pinned layout is used even if the example has one row."""
    model, example = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double(), (rows(1, 8).requires_grad_(),)
    dims = tuple(replace(d, uneven=True) for d in dynamic_dims(model, example, {}, ({0: "n"},)))
    graph = trace(model, example, dynamic=dims)
    program = lower_plan(graph, plan_graph(graph, Mesh({"a": 2}), Request(pins={"0": "S(0)"}, cache=False)))
    for size in (1, 2, 3, 8):
        args = (rows(size, 8).requires_grad_(),)
        at = program_at(program, sizes_of_call(program, args, {}))
        assert_equal_to_one_device(simulate_program(at, program_values(at, model, args)), one_device(copy.deepcopy(model), args))


@torch.library.custom_op("tests::greatest", mutates_args=())
def greatest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(0)


greatest.register_fake(lambda x: x.new_empty(x.shape[1:]))


@pytest.mark.usefixtures("own_rules")
def test_an_operator_that_rejects_empty_shards_makes_a_guard_with_the_reason() -> None:
    """The result of a user's operator on an empty shard is not known."""
    fxshard.register_rule("tests::greatest", "n c -> c", reduce={"n": "max"})
    model, args = Apply(lambda x: torch.ops.tests.greatest(x)), (rows(7, 2),)
    dims = tuple(replace(d, uneven=True) for d in dynamic_dims(model, args, {}, ({0: "n"},)))
    graph = trace(model, args, dynamic=dims, train=False)
    annotated = annotate(graph, Mesh({"a": 2}))
    programs = [lower_plan(graph, random_graph_plan(annotated, seed)) for seed in range(6)]
    refused = {program.refuses({"n": 1}) for program in programs} - {None}
    assert refused and all("tests.greatest.default does not accept an empty shard" in str(reason) for reason in refused), refused
    assert all("test_empty_shards_any_size.py:" in str(reason) for reason in refused), refused
    assert all(program.refuses({"n": 2}) is None for program in programs)


class Frozen(nn.Module):
    """A batch norm that trains its weight with fixed statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * 2


def test_a_kernel_that_crashes_on_an_empty_shard_is_not_called() -> None:
    """Torch's kernel divides by the number of rows, which kills the process."""
    model, args = Frozen(), (torch.randn(7, 3).double(),)
    dims = tuple(replace(d, uneven=True) for d in dynamic_dims(model, args, {}, ({0: "n"},)))
    graph = trace(model, args, dynamic=dims)
    program = lower_plan(graph, plan_graph(graph, Mesh({"a": 2}), Request(input_layouts="S(0)", output_layouts="S(0)", cache=False)))
    refused = str(program.refuses({"n": 1}))
    assert "native_batch_norm_backward.default does not accept an empty shard" in refused and "test_empty_shards_any_size.py:" in refused
    for size in (2, 5):
        call = (torch.randn(size, 3).double(),)
        at = program_at(program, {"n": size})
        assert_equal_to_one_device(simulate_program(at, program_values(at, model, call)), one_device(copy.deepcopy(model), call))


def test_attention_with_an_empty_shard_of_queries() -> None:
    """The query that pads an empty shard adds nothing to the gradients of keys and values."""
    model, graph = traced("attention over a length")
    pins = {"getitem": "S(2)", "getitem_2": "S(2)"}  # the result and the gradient of the queries
    program = lower_plan(graph, plan_graph(graph, Mesh({"a": 2}), Request(pins=pins, cache=False)))
    for size in (1, 2, 5):
        args = (rows(size, 8).requires_grad_(),)
        at = program_at(program, sizes_of_call(program, args, {}))
        result = simulate_program(at, program_values(at, model, args))
        out = model(*args)
        (gradient,) = torch.autograd.grad(out, args, torch.ones_like(out))
        torch.testing.assert_close(result.grads["args[0]"], gradient, rtol=1e-9, atol=1e-12)
