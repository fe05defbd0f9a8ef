"""Layer, group and batch norm while tracing: their parts are torch's operators, in value, gradients and dtypes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxshard.passes.trace.functions.norms import NORMS
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import SQUARE, Function, simulated
from tests.slices import diagonal
from tests.strategies.samples import positive, real

aten = torch.ops.aten


@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (1e-3, 1e4)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_parts_are_torchs_norms(affine: bool, scale: float, offset: float) -> None:
    """Forward and backward, also for values far from zero, where a difference of squares would lose digits."""
    x = real(4, 6, 3, 5) * scale + offset
    row, channel = (positive(3, 5), real(3, 5)), (positive(6), real(6))
    layer, group = (lambda x, *wb: F.layer_norm(x, (3, 5), *wb, eps=1e-5)), (lambda x, *wb: F.group_norm(x, 2, *wb, eps=1e-5))
    for vectors, call in ((row, layer), (channel, group)):
        leaves = [t.clone().requires_grad_() for t in (x, *(vectors if affine else ()))]
        want = call(*leaves)
        tangent = real(*x.shape)
        gradients = torch.autograd.grad(want, leaves, tangent)
        torch.testing.assert_close(_in_parts(call, leaves, tangent), (want, *gradients), rtol=1e-9, atol=1e-9 / scale)


def _in_parts(call: Any, leaves: list[Any], tangent: torch.Tensor, wanted: list[Any] | None = None) -> tuple[torch.Tensor, ...]:
    """The same call, with its norms replaced by the planning decompositions."""
    parts = 0

    class Parts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal parts
            parts += op.namespace == "fxshard"
            with self if op in NORMS else contextlib.nullcontext():
                return NORMS.get(op, op)(*args, **(kwargs or {}))

    with Parts():
        out = call(*leaves)
        gradients = torch.autograd.grad(out, wanted or leaves, tangent)
    assert parts >= 7
    return (out, *gradients)


def test_half_precision_is_summed_in_float32() -> None:
    x = (real(3, 4096) + 3).to(torch.bfloat16)
    out, mean, _ = NORMS[aten.native_layer_norm.default](x, [4096], None, None, 1e-5)
    assert out.dtype == torch.bfloat16 and mean.dtype == torch.float32
    want = F.layer_norm(x.double(), (4096,), eps=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-8)


def test_empty_rows_are_left_to_torch() -> None:
    assert NORMS[aten.native_layer_norm.default](real(3, 0), [0], None, None, 1e-5) is NotImplemented


@pytest.mark.parametrize("call", [lambda x, w, b: F.layer_norm(x, (6,), w, b), lambda x, w, b: F.group_norm(x.transpose(1, 2), 2, w, b)])
def test_half_precision_with_float32_weights(call: Any) -> None:
    """Gradients of float32 weights are never rounded to bfloat16."""
    x = real(8, 33, 6).to(torch.bfloat16)
    weight, bias = positive(6).float().requires_grad_(), real(6).float().requires_grad_()
    tangent = real(*call(x, weight, bias).shape).to(torch.bfloat16)
    exact = [t.double().detach().requires_grad_() for t in (weight, bias)]
    want = torch.autograd.grad(call(x.double(), *exact), exact, tangent.double())
    _, *have = _in_parts(call, [x, weight, bias], tangent, [weight, bias])
    for gradient, truth in zip(have, want, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), truth, rtol=1e-5, atol=1e-4)


HALF, TANGENT = real(4, 6, 5).to(torch.bfloat16) * 2 + 3, real(5)
STATISTICS: dict[str, Any] = {
    "layer": lambda x, w: torch.native_layer_norm(x, (5,), None if w is None else w[:5], None, 1e-5),
    "layer, by the operator": lambda x, w: aten.native_layer_norm.default(x, (5,), None if w is None else w[:5], None, 1e-5),
    "group": lambda x, w: torch.native_group_norm(x, w, None, 4, 6, 5, 2, 1e-5),
    "group, by the operator": lambda x, w: aten.native_group_norm(x, w, None, 4, 6, 5, 2, 1e-5),
    "batch": lambda x, w: torch.native_batch_norm(x, w, None, None, None, True, 0.1, 1e-5),
    "batch, by the operator": lambda x, w: aten._native_batch_norm_legit.no_stats(x, w, None, True, 0.1, 1e-5),
    "batch, wide running": lambda x, w: torch.native_batch_norm(x, w, None, *_running(x, w), True, 0.1, 1e-5),
    "batch, functional": lambda x, w: aten._native_batch_norm_legit_functional(x, w, None, *_running(x, w), True, 0.1, 1e-5)[:3],
}


def _running(x: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Running statistics in the dtype that torch's kernel accepts: that of the weights, without weights float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32) if weight is None else weight.dtype
    return torch.zeros(6, dtype=dtype), torch.ones(6, dtype=dtype)


@pytest.mark.parametrize(("name", "dtype"), diagonal([*STATISTICS], [None, torch.bfloat16, torch.float32]))
def test_statistics_that_a_model_reads_have_torchs_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Also for values computed from them, on a CPU. Gradients read the statistics in float32."""
    weight = None if dtype is None else positive(6).to(dtype)

    def forward(_: Any, x: Any, w: Any) -> Any:
        out, mean, rstd = STATISTICS[name](x, w)
        return out * TANGENT.to(x.dtype), mean.detach(), rstd.detach(), mean.detach() * 3

    model, args = Function(forward), (HALF.clone().requires_grad_(), weight)
    graph = trace(model, args)
    result = simulated(graph, SQUARE, model, args, plan=1)
    for have, want in zip(result.outputs, model(*args), strict=True):
        torch.testing.assert_close(have, want, rtol=2**-6, atol=2**-6)
    exact = HALF.double().requires_grad_()
    (want,) = torch.autograd.grad(forward(None, exact, weight if weight is None else weight.double())[0].sum(), exact)
    torch.testing.assert_close(result.grads["args[0]"].double(), want, rtol=2**-7, atol=2**-7)
    assert [n.args[3].meta["val"].dtype for n in graph.nodes if "norm_sums" in str(n.target)] == [torch.float32]
