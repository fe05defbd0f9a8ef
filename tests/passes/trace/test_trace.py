"""The ends of a traced graph: inputs, outputs, gradients and mutations by name, in every form that a model can have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxshard.graph.planning_graph import PlanningGraph, source_line
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import Simulation
from tests.passes.tracing import ONE, Function, check_eager, real, simulated, targets

X = real(6, 4, grad=False)


class Net(Function):
    """A function of a small model: ``lin`` (linear), ``norm`` (batch norm) and ``x``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        torch.manual_seed(0)
        self.lin, self.norm = nn.Linear(4, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64)


def names(graph: PlanningGraph, kind: str) -> list[str]:
    return [i.name for i in (graph.outputs if kind in ("output", "gradient", "mutation") else graph.inputs) if i.kind == kind]


def check(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[PlanningGraph, Simulation]:
    return check_eager(Net(function), *args, **options)


def test_parameters_inputs_and_gradients_are_named() -> None:
    graph, _ = check(lambda self, x: self.lin(x).sin(), X)
    assert names(graph, "parameter") == names(graph, "gradient") == ["lin.weight", "lin.bias"]
    assert names(graph, "input") == ["args[0]"] and names(graph, "tangent") == ["tangents[0]"]
    assert {"lin_weight", "lin_bias", "args_0"} <= {n.name for n in graph.nodes}


def test_tied_parameters_are_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4, dtype=torch.float64), nn.Linear(4, 9, bias=False, dtype=torch.float64)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    graph, result = check_eager(Tied(), torch.tensor([[1, 2, 8], [0, 3, 3]]))
    assert names(graph, "parameter") == ["embed.weight"] and graph.aliases == {"head.weight": "embed.weight"}
    assert result.grads["head.weight"] is result.grads["embed.weight"]


def test_frozen_parameters_have_no_gradient() -> None:
    model = Net(lambda self, x: self.lin(x))
    model.lin.bias.requires_grad_(False)
    graph, _ = check_eager(model, X)
    assert names(graph, "gradient") == ["lin.weight"] and set(names(graph, "parameter")) == {"lin.weight", "lin.bias"}


def test_inputs_that_require_a_gradient_get_one() -> None:
    graph, _ = check(lambda self, x, y: self.lin(x) * y, real(6, 4), X)
    assert names(graph, "gradient") == ["lin.weight", "lin.bias", "args[0]"]


def test_keywords_and_nested_inputs() -> None:
    def forward(self: Any, x: torch.Tensor, *, scale: float, flag: bool, nothing: None, data: Any) -> torch.Tensor:
        return self.lin(x) * scale + data["k"][0] if flag and nothing is None else x

    given = {"scale": 2.5, "flag": True, "nothing": None, "data": {"k": (torch.ones(4), "text"), "unused": torch.ones(2)}}
    graph, _ = check(forward, X, kwargs=given)
    assert set(names(graph, "input")) >= {"args[0]", "kwargs['data']['k'][0]"}


def test_numbers_and_flags_are_part_of_the_graph() -> None:
    model = Net(lambda self, x, power, half=False: (self.lin(x) ** power) * (0.5 if half else 1))
    graphs = [trace(model, (X, 2), {}), trace(model, (X, 3), {}), trace(model, (X, 2), {"half": True})]
    assert len({g.hash for g in graphs}) == 3
    check_eager(model, X, 3, kwargs={"half": True})


class Pair(NamedTuple):
    first: Any
    second: Any


OUTPUTS: dict[str, Callable[..., Any]] = {
    "one": lambda self, x: self.lin(x),
    "nested": lambda self, x: {"a": [self.lin(x), (x.sin(),)], "b": Pair(self.lin(x).cos(), x)},
    "numbers among tensors": lambda self, x: (3, self.lin(x), None, "text", {"flag": True, "y": self.lin(x).sum(), "size": x.shape[0]}),
    "not differentiable": lambda self, x: (self.lin(x).argmax(-1), self.lin(x), self.lin(x) > 0),
    "detached": lambda self, x: (self.lin(x).detach(), self.lin(x)),
    "without gradients inside": lambda self, x: (torch.no_grad()(lambda: self.lin(x))(), self.lin(x)),
    "the same twice": lambda self, x: (lambda y: (y, y, y.T, y[0], y.view(-1)))(self.lin(x)),
    "an input and its views": lambda self, x: (x, self.lin(x), x.T, x[0], x.view(-1)),
    "a parameter": lambda self, x: (self.lin.weight, self.lin(x), self.lin.weight.T),
    "a buffer": lambda self, x: (self.norm.running_mean, self.norm(x)),
    "none that depends on a parameter": lambda self, x: x.argmax(-1),
    "a complex number inside": lambda self, x: torch.fft.fft(self.lin(x)).abs(),
}


@pytest.mark.parametrize("forward", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs(forward: Callable[..., Any]) -> None:
    graph, result = check(forward, X)
    model = Net(forward)
    want = model(X)
    assert torch.utils._pytree.tree_structure(result.outputs) == torch.utils._pytree.tree_structure(want)
    fixed = [
        (a, b)
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, (result.outputs, want)), strict=True)
        if not isinstance(b, torch.Tensor)
    ]
    assert all(a == b and type(a) is type(b) for a, b in fixed)
    assert all(n.startswith("outputs[") for n in names(graph, "output"))


def test_only_differentiable_outputs_have_tangents() -> None:
    graph, _ = check(lambda self, x: (self.lin(x).argmax(-1), 3, self.lin(x), x), X)
    assert names(graph, "output") == ["outputs[0]", "outputs[2]", "outputs[3]"]
    assert names(graph, "tangent") == ["tangents[2]"]


def test_buffers_that_change() -> None:
    graph, result = check(lambda self, x: self.norm(self.lin(x)), X)
    assert set(names(graph, "mutation")) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert int(result.mutations["norm.num_batches_tracked"]) == 1


def test_an_input_that_changes() -> None:
    model = Net(lambda self, x: self.lin(x.add_(1)))
    graph = trace(model, (X.clone(),))
    assert names(graph, "mutation") == ["args[0]"]
    torch.testing.assert_close(simulated(graph, ONE, model, (X.clone(),)).mutations["args[0]"], X + 1)


@pytest.mark.parametrize("training", [True, False])
def test_inference(training: bool) -> None:
    model = Net(lambda self, x: self.norm(self.lin(x))).train(training)
    graph, _ = check_eager(model, X, train=False)
    assert not names(graph, "gradient") and not names(graph, "tangent") and not graph.train
    assert bool(names(graph, "mutation")) == training


def test_the_model_is_not_changed() -> None:
    model = Net(lambda self, x: self.norm(self.lin(x)))
    model.table, model.lin.bias.requires_grad = torch.ones(4), False
    model.norm.eval()

    def state() -> list[Any]:
        tensors = [*model.named_parameters(), *model.named_buffers(), ("table", model.table)]
        return [(n, id(t), t._version, t.requires_grad, t.device, t.grad, t.tolist()) for n, t in tensors] + [
            m.training for m in model.modules()
        ]

    x, before = X.clone().requires_grad_(), state()
    trace(model, (x,))
    trace(model, (x,), train=False)
    assert state() == before and x.grad is None and torch.is_grad_enabled()


def _attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    z = F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])
    return z.exp()


def test_source_lines_forward_and_backward() -> None:
    graph = trace(Net(_attention), (X,))
    lines, first = inspect.getsourcelines(_attention)
    where = {i: f"{__file__}:{first + i}: {lines[i].strip()}" for i in (1, 2, 3)}
    expected = {
        "fxshard.einsum.default": {where[1]},
        "fxshard.sdpa.default": {where[2]},
        "fxshard.sdpa_backward.default": {where[2]},
        "aten.exp.default": {where[3]},
    }
    for target, places in expected.items():
        assert {source_line(n) for n in graph.nodes if str(n.target) == target} == places
    assert sum(n.target is torch.ops.fxshard.einsum.default for n in graph.nodes) == 2, (
        "one in the forward, one in the backward: x needs no gradient"
    )


def test_autocast_inside() -> None:
    def forward(self: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.lin(x)
            z = F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])
            u = torch.softmax(y @ y.T, -1)
        return y.float(), z.float(), u

    model = Net(forward).float()
    graph, result = check_eager(model, X.float(), rtol=2e-2)
    kinds = {n.meta["val"].dtype for n in graph.nodes if n.target is torch.ops.fxshard.einsum.default}
    assert kinds == {torch.bfloat16} and [o.dtype for o in result.outputs] == [o.dtype for o in model(X.float())]


def test_autocast_outside() -> None:
    model = Net(lambda self, x: self.lin(x)).float()
    with torch.autocast("cpu", torch.bfloat16):
        graph = trace(model, (X.float(),))
        want = model(X.float())
    torch.testing.assert_close(simulated(graph, ONE, model, (X.float(),)).outputs, want, rtol=2e-2, atol=1e-2)
    assert want.dtype == torch.bfloat16


def test_checkpointing_keeps_results_and_tags() -> None:
    graph, _ = check(lambda self, x: checkpoint(lambda y: torch.sin(self.lin(y)).exp(), x, use_reentrant=False), X)
    tagged = {str(n.target) for n in graph.nodes if "recompute" in n.meta}
    assert {"aten.sin.default", "aten.exp.default"} <= tagged


def test_half_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).bfloat16()
    graph, _ = check_eager(model, X.bfloat16(), rtol=5e-2)
    assert targets(graph) and {n.meta["val"].dtype for n in graph.nodes if n.op == "placeholder"} == {torch.bfloat16}
