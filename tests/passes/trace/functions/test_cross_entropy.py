"""Cross-entropy and softmax from trace to simulation, compared with torch in float64: random legal plans, and sharded classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxshard.errors import TraceError
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.simulate.simulate import Simulation, simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.passes.tracing import Function, check_eager, input_gradients, real, targets

TARGET = torch.tensor([0, 3, -100, 6, 3])
WEIGHT = real(70, grad=False).abs()
PIECES = {"aten.amax.default", "fxshard.sum_exp.default", "fxshard.target_score.default", "fxshard.cross_entropy.default"}


def check_sharded_classes(function: Callable[..., Any], *args: torch.Tensor, ranks: int = 4) -> ShardingPlan:
    """The plan of ``function`` for logits sharded on dim 1. Its results and gradients are simulated and compared with eager torch."""
    model = Function(lambda self, *a: function(*a))
    graph = trace(model, args)
    layouts = tuple("S(1)" if a.is_floating_point() else "R" for a in args)
    plan = plan_graph(graph, Mesh({"tp": ranks}), Request(input_layouts=layouts, objective="communication"))
    program = lower(graph, plan)
    result = simulate_program(program, program_values(program, model, args, {}))
    assert_equal_to_one_device(result, one_device(model, args))
    same(result.grads, input_gradients(model, args))
    return plan


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def sizes(plan: ShardingPlan) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((c.kind, c.buffer) for c in plan.collectives)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [WEIGHT, None])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_reductions_weights_and_smoothing(reduction: str, weight: torch.Tensor | None, smoothing: float) -> None:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)

    graph, _ = check_eager(Function(lambda self, *a: loss(*a)), real(5, 70), TARGET, plans=2)
    assert targets(graph) >= PIECES and not any("softmax" in t or "nll" in t for t in targets(graph))
    plan = check_sharded_classes(loss, real(5, 70), TARGET)
    assert sizes(plan) == [("all_reduce", (5,))] * (3 + (smoothing > 0))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("classes", [5, 50257])
def test_classes_that_no_mesh_divides(ranks: int, classes: int) -> None:
    """Five classes on four ranks leave one rank without a class."""
    check_sharded_classes(F.cross_entropy, real(2, classes), torch.tensor([classes - 1, 2]), ranks=ranks)


def test_dims_behind_the_classes_and_no_batch() -> None:
    plan = check_sharded_classes(F.cross_entropy, real(2, 50, 3, 2), torch.tensor([[[0, 4], [1, 2], [3, -100]], [[4, 4], [0, 1], [2, 3]]]))
    assert sizes(plan) == [("all_reduce", (2, 3, 2))] * 3
    check_eager(Function(lambda self, x, t: F.cross_entropy(x, t, ignore_index=2)), real(7), torch.tensor(3), plans=3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_ignored(reduction: str) -> None:
    """As in torch, the mean of no rows is nan and their sum is 0."""
    model, args = Function(lambda self, x, t: F.cross_entropy(x, t, reduction=reduction)), (real(3, 5), torch.full((3,), -100))
    result = simulated_by_classes(model, args)
    same(result.outputs, model(*args))
    same(result.grads, input_gradients(model, args))


def test_infinite_logits() -> None:
    x = real(4, 6).detach()
    x[0, 1:4] = x[1, 2] = x[2, :] = -torch.inf
    model, args = Function(lambda self, x, t: F.cross_entropy(x, t, reduction="none")), (x.requires_grad_(), torch.tensor([0, 2, 1, 5]))
    result = simulated_by_classes(model, args)
    same(result.outputs, model(*args))
    same(result.grads, input_gradients(model, args))


def simulated_by_classes(model: nn.Module, args: tuple[torch.Tensor, ...], ranks: int = 3) -> Simulation:
    graph = trace(model, args)
    plan = plan_graph(graph, Mesh({"tp": ranks}), Request(input_layouts=("S(1)", "R"), objective="communication"))
    program = lower(graph, plan)
    return simulate_program(program, program_values(program, model, args, {}))


def chain(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(x, -1), target)


def modules(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.NLLLoss(ignore_index=0)(nn.LogSoftmax(dim=1)(x), target.clamp_min(0)) + nn.CrossEntropyLoss()(x * 2, target)


@pytest.mark.parametrize("function", [chain, modules])
def test_log_softmax_and_nll_loss_become_cross_entropy(function: Any) -> None:
    plan = check_sharded_classes(function, real(5, 70), TARGET)
    assert sizes(plan) == [("all_reduce", (5,))] * (6 if function is modules else 3)


def test_a_view_between_them_causes_no_gather() -> None:
    def viewed(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(x.log_softmax(1).view(5, 70), target)

    assert {c.buffer for c in check_sharded_classes(viewed, real(5, 70), TARGET).collectives} == {(5,)}


def changed(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    y = F.log_softmax(x, 1)
    y[0].mul_(2)
    return F.nll_loss(y, target)


def changed_before(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    x = x * 1
    y = F.log_softmax(x, 1)
    x.mul_(2)
    return F.nll_loss(y, target)


def other_dim(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(F.log_softmax(x, 0), target)


@pytest.mark.parametrize("function", [changed, changed_before, other_dim])
def test_pairs_that_are_no_cross_entropy_stay_apart(function: Any) -> None:
    graph, _ = check_eager(Function(lambda self, *a: function(*a)), real(5, 7, grad=False), TARGET, train=False, plans=2)
    assert "fxshard.softmax.default" in targets(graph)


def test_probabilities_as_targets_stay_products() -> None:
    soft = real(5, 7, grad=False).softmax(1)
    graph, _ = check_eager(Function(lambda self, x: F.cross_entropy(x, soft, label_smoothing=0.1)), real(5, 7), plans=2)
    assert "fxshard.cross_entropy.default" not in targets(graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    x = (real(6, 40, grad=False) * 4).to(dtype).requires_grad_()
    target = torch.tensor([0, 39, 7, -100, 8, 20])
    model = Function(lambda self, x, t: F.cross_entropy(x, t))
    exact = F.cross_entropy(x.double(), target)
    result = simulated_by_classes(model, (x, target))
    assert result.outputs.dtype == dtype == model(x, target).dtype
    torch.testing.assert_close(result.outputs.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    (grad,) = torch.autograd.grad(exact, x)
    torch.testing.assert_close(result.grads["args[0]"], grad)


def test_autocast_computes_losses_in_float32() -> None:
    def loss(_: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(x, target) + F.nll_loss(x, target)

    x = real(6, 40, grad=False).bfloat16()
    args = x, torch.tensor([0, 39, 7, -100, 8, 20])
    graph, result = check_eager(Function(loss), *args, train=False, rtol=1e-6)
    assert result.outputs.dtype == torch.float32 and "fxshard.cross_entropy.default" in targets(graph)


def test_arguments_that_torch_refuses_are_refused() -> None:
    for target, weight in ((torch.zeros(3, dtype=torch.int32), None), (torch.zeros(2, dtype=torch.int64), None), (TARGET, real(6))):
        with pytest.raises(TraceError):
            trace(Function(lambda _, x, t, w=weight: F.cross_entropy(x, t, w)), (real(5, 7), target))


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_over_a_sharded_dim(function: Any) -> None:
    """A maximum and a sum of exponentials forward, one sum backward; nothing is gathered."""
    plan = check_sharded_classes(lambda x: function(x, 1).cos(), real(5, 7))
    moved = [c for c in plan.collectives if c.kind == "all_reduce"]
    assert [c.buffer for c in moved] == [(5,)] * 3


def test_safe_softmax_of_rows_without_any_key() -> None:
    def attend(self: Any, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=1e-12)

    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    check_eager(Function(attend), real(1, 2, 3, 4), mask, plans=3)
