"""Operators for which DTensor of torch 2.13 is wrong or fails, measured on two gloo ranks: fxshard gives the results of one device.

Each case is traced with its backward, planned with the input layouts of the DTensor run, simulated on 2 and 3 ranks, and compared
with eager torch in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.simulate.simulate import Simulation, simulate_program
from fxshard.runtime.simulate.values import program_values
from tests.passes.tracing import Function, input_gradients, real

IMAGES, KERNEL = real(4, 6, 8, 7), real(4, 6, 3, 3)
LOGITS, TARGET = real(6, 5), torch.tensor([0, 4, -100, 2, 2, 1])
WEIGHT = real(5, grad=False).abs() + 0.1
TABLE, TOKENS = real(10, 4), torch.tensor([[1, 9, 0], [4, 4, 7]])
SIGNS = torch.tensor([1.0, -1, 1, 1], dtype=torch.float64)
X = real(4, 6)


def run(
    function: Callable[..., Any], args: tuple[torch.Tensor, ...], layouts: str, mesh: Mapping[str, int], **asked: Any
) -> tuple[ShardingPlan, Simulation]:
    """Plans and simulates ``function``. ``layouts``: of the inputs, separated by commas; ``asked``: other options of the plan."""
    model = Function(lambda _, *a: function(*a))
    graph = trace(model, args)
    plan = plan_graph(graph, Mesh(mesh), Request(input_layouts=tuple(layouts.split(",")), **asked))
    program = lower(graph, plan)
    torch.manual_seed(1234)
    return plan, simulate_program(program, program_values(program, model, args, {}))


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], str]] = {
    "conv2d, height": (lambda x, w: F.conv2d(x, w, padding=1), (IMAGES, KERNEL), "S(2),R"),
    "conv2d, width": (lambda x, w: F.conv2d(x, w, stride=2), (IMAGES, KERNEL), "S(3),R"),
    "conv2d, weight by outputs": (lambda x, w: F.conv2d(x, w), (IMAGES, KERNEL), "R,S(0)"),
    "conv2d, input by channels": (lambda x, w: F.conv2d(x, w), (IMAGES, KERNEL), "S(1),R"),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, groups=2), (IMAGES, real(4, 3, 3, 3)), "S(1),S(0)"),
    "cross_entropy, ignored": (F.cross_entropy, (LOGITS, TARGET), "S(0),S(0)"),
    "cross_entropy, weights": (lambda x, t: F.cross_entropy(x, t, WEIGHT), (LOGITS, TARGET), "S(0),S(0)"),
    "cross_entropy, batch of 5": (F.cross_entropy, (LOGITS[:5].detach().requires_grad_(), TARGET[:5]), "S(0),S(0)"),
    "cosine_embedding_loss": (lambda a, b: F.cosine_embedding_loss(a, b, SIGNS), (X, real(4, 6, seed=1)), "S(1),S(1)"),
    "embedding, sum": (lambda w, i: F.embedding(i, w).sum(), (TABLE, TOKENS), "S(0),R"),
    "embedding, view": (lambda w, i: F.embedding(i, w).view(6, 4), (TABLE, TOKENS), "S(0),R"),
    "group_norm": (lambda x: F.group_norm(x, 3), (IMAGES,), "S(0)"),
    "group_norm, channels": (lambda x: F.group_norm(x, 3), (IMAGES,), "S(1)"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (IMAGES,), "S(0)"),
    "avg_pool2d, height": (lambda x: F.avg_pool2d(x, 2), (IMAGES,), "S(2)"),
    "cdist": (torch.cdist, (X, real(5, 6)), "S(0),R"),
    "unfold": (lambda x: F.unfold(x, 3), (IMAGES,), "S(1)"),
    "unfold of a tensor": (lambda x: x.unfold(1, 3, 2), (X,), "S(1)"),
    "prod": (lambda x: x.prod(1), (X,), "S(1)"),
    "prod of all": (lambda x: x.prod(), (X,), "S(0)"),
    "split": (lambda x: [part * (i + 1) for i, part in enumerate(x.split(2, 1))], (X,), "S(1)"),
    "expand": (lambda x: x.unsqueeze(1).expand(4, 3, 6), (X,), "S(0)"),
    "expand of a dim of 1": (lambda x: x.sum(0, keepdim=True).expand(5, 6), (X,), "S(0)"),
    "flatten, uneven": (lambda x: x.flatten(), (real(5, 4),), "S(0)"),
    "flatten, the inner dim": (lambda x: x.flatten(), (real(4, 5),), "S(1)"),
    "unflatten, uneven": (lambda x: x.unflatten(0, (5, 2)), (real(10),), "S(0)"),
    "unflatten, the inner dim": (lambda x: x.unflatten(1, (5, 2)), (real(3, 10),), "S(1)"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, ranks: int) -> None:
    function, args, layouts = CASES[name]
    _, result = run(function, args, layouts, {"a": ranks})
    model = Function(lambda _, *a: function(*a))
    for got, want in ((result.outputs, model(*args)), (result.grads, input_gradients(model, args))):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_filling_a_pending_tensor() -> None:
    def fill(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).fill_(2) + x.sum() * 0

    _, result = run(fill, (X, real(6, 3)), "S(1),S(0)", {"a": 2})
    assert torch.equal(result.outputs, torch.full((4, 3), 2.0, dtype=torch.float64))


def test_dropout_draws_one_mask_however_it_is_sharded() -> None:
    runs = [run(lambda x: F.dropout(x, 0.5), (X,), layout, {"a": n})[1] for layout, n in (("R", 1), ("S(0)", 2), ("S(1)", 3), ("R", 2))]
    first = runs[0]
    assert not torch.equal(first.outputs[:2] == 0, first.outputs[2:] == 0), "rows have different masks"
    for other in runs[1:]:
        assert torch.equal(other.outputs, first.outputs) and torch.equal(other.grads["args[0]"], first.grads["args[0]"])


def test_random_numbers_are_those_of_one_device() -> None:
    asked = [("R", {"a": 1}), ("S(0)", {"a": 2}), ("S(1)", {"a": 2}), ("S(1)S(0)", {"a": 2, "b": 2})]
    drawn = [
        run(lambda x: x + torch.randn(4, 6, dtype=x.dtype), (X,), layout, mesh, output_layouts=layout)[1].outputs for layout, mesh in asked
    ]
    assert all(torch.equal(d, drawn[0]) for d in drawn) and not torch.equal(drawn[0], X)


def collectives(source: str, target: str, mesh: Mapping[str, int]) -> list[tuple[str, str]]:
    """(kind, axis) of the collectives from layout ``source`` to ``target``."""
    plan, result = run(lambda x: x * 2, (real(8, 12, grad=False),), source, mesh, output_layouts=target)
    torch.testing.assert_close(result.outputs, real(8, 12) * 2, rtol=1e-9, atol=0)
    return [(c.kind, c.axis) for c in plan.collectives]


def test_from_one_dim_to_another_is_an_all_to_all() -> None:
    assert collectives("S(0)", "S(1)", {"a": 2}) == [("all_to_all", "a")]


def test_two_axes_move_without_a_gather() -> None:
    """One exchange on each axis; which comes first depends on the copies around them."""
    assert sorted(collectives("S(0)S(0)", "S(1)S(1)", {"a": 2, "b": 2})) == [("all_to_all", "a"), ("all_to_all", "b")]
