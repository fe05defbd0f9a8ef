"""The backend on a mesh of one rank with functions, methods, threads, views, sizes: as on one device, or refused by name."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxshard
from fxshard.errors import RunError
from fxshard.runtime.backend.graph_outputs import View
from tests.runtime.backend.test_backend import sharded

SAME = torch.testing.assert_close


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def test_a_first_call_within_a_checkpoint() -> None:
    """torch compares what autograd saves in the forward and in its repetition: the run that finds shared memory must not count."""

    def with_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ weight).tanh()
        return y, y.t()

    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    gradients = []
    for function in (sharded(with_a_view), with_a_view):
        weight.grad = None
        checkpoint(function, x, use_reentrant=False)[0].square().sum().backward()
        gradients.append(weight.grad)
    SAME(*gradients)


def test_returned_views_share_memory() -> None:
    """Views of an input and of another output: a write to one changes the other."""

    def views(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x.t(), x[1:], y[0], y, y.view(-1), y.detach(), x.detach()

    x = torch.randn(3, 4)
    z = x.clone()
    for outputs, value in ((sharded(views)(x), x), (views(z), z)):
        outputs[0].mul_(2)
        outputs[1].add_(1)
        outputs[2].zero_()
        outputs[4].add_(3)
        SAME(outputs[3], outputs[4].view(3, 4))
        assert outputs[6].data_ptr() == value.data_ptr()
    SAME(x, z)


def test_gradients_pass_views_but_not_detach() -> None:
    weight = nn.Parameter(torch.randn(3, 4))

    def views(x: Tensor) -> tuple[Tensor, ...]:
        y = x * weight
        return y.detach(), y, y.t(), x.detach(), x, weight.t(), weight.detach()

    x = torch.randn(3, 4, requires_grad=True)
    have, want = sharded(views)(x), views(x)
    assert [o.requires_grad for o in have] == [o.requires_grad for o in want] == [False, True, True, False, True, True, False]
    assert have[4] is x
    grads = [torch.autograd.grad(o[1].sum() + (o[2] ** 2).sum() + (o[5] ** 3).sum(), (x, weight)) for o in (have, want)]
    SAME(*grads)


def test_views_under_other_strides_are_refused_and_of_another_dtype_are_copies() -> None:
    compiled = sharded(lambda x: (x[1:], x.view(torch.int32)))
    x = torch.randn(4, 4)
    rows, bits = compiled(x)
    assert rows.data_ptr() == x[1:].data_ptr() and torch.equal(bits, x.view(torch.int32)) and bits.data_ptr() != x.data_ptr()
    SAME(compiled(x.t()), (x.t()[1:], x.t().view(torch.int32)))  # Dynamo guards strides and compiles again
    with pytest.raises(RunError, match=r"a view of a tensor with strides \(4, 1\), which has strides \(1, 4\)"):
        View(False, (3, 4), (4, 1), 4, (4, 1)).of(x.t())


def test_an_input_that_shares_memory_with_a_changed_one_is_refused() -> None:
    """Partly overlapping inputs are refused; separate ones and the same tensor twice, one input to Dynamo, work."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    compiled = sharded(step)
    x = torch.zeros(4)
    assert compiled(x[:2], x[2:]).tolist() == [0, 0] and x.tolist() == [1, 1, 0, 0]
    for _ in range(2):
        with pytest.raises(RunError, match="x is changed in place, and y shares memory with it"):
            compiled(x[:2], x[1:3])
    part = x[:2]
    assert compiled(part, part).tolist() == [4, 4]


def test_a_changed_buffer_that_is_an_argument_too_is_refused() -> None:
    norm = nn.BatchNorm1d(4)
    compiled = sharded(lambda x, y: norm(x) + y)
    with pytest.raises(RunError, match=r"running_mean.* is changed in place, and y shares memory"):
        compiled(torch.randn(3, 4), norm.running_mean.view(1, 4))
    SAME(compiled(torch.ones(3, 4), torch.zeros(1, 4)), torch.zeros(3, 4) + norm.bias)


def test_a_second_derivative_is_refused_and_not_lost() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(2, 3, requires_grad=True)
    compiled = sharded(model)
    have, want = (torch.autograd.grad(m(x).sum(), x, create_graph=True)[0] for m in (compiled, model))
    SAME(have, want)
    with pytest.raises(RunError, match="a gradient of a sharded program is differentiated again"):
        have.square().sum().backward()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def test_functions_and_methods_compiled_separately() -> None:
    """Parameters have the module's names in a bound method; a plain object's tensors are inputs."""
    model, x = Encoder(), torch.randn(2, 4)
    encode, double = sharded(model.encode, pins={"linear.weight": "R"}), sharded(lambda x: model(x) * 2)
    SAME((encode(x), double(x), sharded(model)(x)), (model.encode(x), model(x) * 2, model(x)))
    with pytest.raises(fxshard.FxshardError, match=r"'linear.wight' .*did you mean 'linear.weight'|linear.wight"):
        sharded(model.encode, pins={"linear.wight": "R"})(x)

    class Trainer:
        def __init__(self) -> None:
            self.weight = torch.randn(4, 4, requires_grad=True)

        def loss(self, x: Tensor) -> Tensor:
            return (x @ self.weight).square().sum()

    trainer = Trainer()
    SAME(*(torch.autograd.grad(f(x), trainer.weight) for f in (sharded(trainer.loss), trainer.loss)))


def test_compiled_functions_within_compiled_ones() -> None:
    model, x = nn.Sequential(Encoder(), nn.Linear(4, 2)), torch.randn(2, 4)
    reference = copy.deepcopy(model)
    inner = sharded(model[0].encode)
    SAME(sharded(lambda x: inner(x) * 2)(x), reference[0].encode(x) * 2)
    model[0] = sharded(model[0])
    outer = sharded(model)
    for m in (outer, reference):
        m(x).square().sum().backward()
    SAME([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_calls_from_another_thread() -> None:
    model, x, found = Encoder(), torch.randn(2, 4), []
    compiled = sharded(model)

    def step() -> None:
        out = compiled(x)
        found.append((out, torch.autograd.grad(out.square().sum(), model.linear.weight)[0]))

    for _ in range(2):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    step()
    want = torch.autograd.grad(model(x).square().sum(), model.linear.weight)[0]
    assert len(found) == 3
    for out, grad in found:
        SAME((out, grad), (model(x), want))


def test_inference_mode_before_and_after_training() -> None:
    model, x = Encoder(), torch.randn(2, 4)
    compiled = sharded(model)
    with torch.inference_mode():
        out, inside = compiled(x), torch.randn(2, 4)
        assert out.is_inference()
        SAME((out, compiled(inside)), (model(x), model(inside)))
    SAME(*(torch.autograd.grad(m(x).sum(), model.linear.weight) for m in (compiled, model)))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):  # torch raises it without compile too
        compiled(inside)


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_sizes_and_numbers_with_each_value_of_dynamic(dynamic: bool | None) -> None:
    def step(x: Tensor, n: int) -> tuple[Any, ...]:
        return x.reshape(x.shape[0] // 2, -1) * n, torch.zeros(n, x.shape[0]), n // 2, x.view(-1), x[:n]

    compiled = sharded(step, dynamic)
    for rows, n in ((4, 2), (6, 3), (8, 5), (2, 1), (0, 2)):
        x = torch.randn(rows, 2)
        if rows or n != 2:
            SAME(compiled(x, n), step(x, n))
    model = Encoder()
    compiled = sharded(model, dynamic)
    for rows in (3, 5, 1, 0):
        x = torch.randn(rows, 4)
        SAME(*(torch.autograd.grad(m(x).square().sum(), model.linear.weight) for m in (compiled, model)))


def test_outputs_without_tensors_and_numbers_that_depend_on_data() -> None:
    assert sharded(lambda x: x.shape[0] + 1)(torch.ones(3)) == 4

    def write(x: Tensor) -> None:
        x.add_(1)

    x = torch.zeros(3)
    assert sharded(write)(x) is None and x.tolist() == [1, 1, 1]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        scaled = sharded(lambda x: (x * x.sum().item(), 2 * x.sum().item()))
        for k in (1.0, 2.0):
            SAME(scaled(torch.full((2,), k)), (torch.full((2,), 2 * k * k), 4 * k))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = sharded(lambda x: x.nonzero() * 2)
        assert [found(torch.tensor(v)).tolist() for v in ([0, 1], [3, 4])] == [[[2]], [[0], [2]]]


def test_a_graph_break_under_fullgraph_is_dynamos_error() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    SAME(sharded(broken)(torch.ones(2)), torch.full((2,), 3.0))
    options = {"mesh": fxshard.Mesh({"dp": 1}), "compiler": "eager"}
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(broken, backend="fxshard", fullgraph=True, options=options)(torch.ones(2))


def test_views_keep_strides_and_floats_keep_signs() -> None:
    big, wide = torch.randn(8, 10), torch.randn(8, 12)

    def tail(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[1:], x.sum(-1)

    compiled = torch.compile(tail, backend="fxshard", dynamic=True, options={"mesh": fxshard.Mesh({"tp": 1}), "compiler": "eager"})
    for x in (big[:, :6], wide[:, :6], big[:6, :6]):
        for found, wanted in zip(compiled(x), tail(x), strict=True):
            SAME(found, wanted)
            assert found.stride() == wanted.stride()

    def divide(x: Tensor, by: float) -> Tensor:
        return x / (by * torch.ones(()))

    compiled = torch.compile(divide, backend="fxshard", dynamic=True, options={"mesh": fxshard.Mesh({"tp": 1}), "compiler": "eager"})
    for by in (2.0, 3.0, 0.0, -0.0, float("nan")):
        SAME(compiled(torch.ones(3), by), divide(torch.ones(3), by), equal_nan=True)
