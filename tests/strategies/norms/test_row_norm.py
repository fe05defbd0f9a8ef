"""The parts of layer and group norm: every dim is free, and sums over cut dims that are normalised stay pending."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.passes.trace.functions.norms import NORMS
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import SQUARE, Function, simulated
from tests.strategies.samples import positive, real
from tests.strategies.shards import check, check_mesh

aten, own = torch.ops.aten, torch.ops.fxshard
X, WEIGHT, BIAS = real(5, 6, 7) * 2 + 50, positive(7), real(7)
DIMS, COUNT = [2], 7
TOTAL = own.row_sum(X, DIMS)
MEAN, RSTD = own.row_mean(TOTAL, COUNT), own.row_rstd(own.row_spread(X, TOTAL, COUNT, DIMS), COUNT, 1e-5)


def test_sums_of_shards_are_pending() -> None:
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> P", "P -> P"} <= check("fxshard.row_sum.default", X, DIMS)
    specs = check("fxshard.row_spread.default", X, TOTAL, COUNT, DIMS)
    assert {"S(0), S(0) -> S(0)", "S(2), R -> P"} <= specs
    assert not any("P, " in s for s in specs), "the spread is no linear function"
    specs = check("fxshard.row_norm_sums.default", X * 2, X, MEAN, RSTD, WEIGHT, DIMS)
    assert {"S(1), S(1), S(1), S(1), R -> S(2)", "S(2), S(2), R, R, S(0) -> P", "P, R, R, R, R -> P"} <= specs


@pytest.mark.parametrize("weight, bias", [(WEIGHT, BIAS), (WEIGHT, None), (None, BIAS), (None, None)])
def test_statistics_are_applied_to_shards(weight: Any, bias: Any) -> None:
    specs = check("fxshard.row_normalise.default", X, MEAN, RSTD, weight, bias)
    assert {s.split(",")[0] for s in specs if "P" not in s} == {"R", "S(0)", "S(1)", "S(2)"}
    sums = own.row_norm_sums(X * 2, X, MEAN, RSTD, weight, DIMS)
    specs = check("fxshard.row_norm_backward.default", X * 2, X, MEAN, RSTD, weight, sums, COUNT)
    assert {s.partition(",")[0] for s in specs} == {"R", "S(0)", "S(1)", "S(2)", "P", "P(avg)"}


def test_weights_are_sums_over_rows() -> None:
    specs = check("fxshard.row_norm_weight.default", X * 2, X, MEAN, RSTD, [0, 1])
    assert {"S(0), S(0), S(0), S(0) -> P", "S(2), S(2), R, R -> S(0)", "P, R, R, R -> P"} <= specs
    assert {"S(1) -> P", "S(2) -> S(0)", "P -> P"} <= check("fxshard.row_norm_weight.default", X, None, None, None, [0, 1])


def test_rows_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("fxshard.row_spread.default", (X, TOTAL, COUNT, DIMS), mesh=(2, 2))}
    assert {"S(0)S(2), S(0)R -> S(0)P", "S(2)S(2), RR -> PP"} <= specs


@pytest.mark.parametrize("scale, offset", [(1.0, 0.0), (1e-3, 1e4)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_parts_are_torchs_norms(affine: bool, scale: float, offset: float) -> None:
    """Forward and backward, far from zero too, where a difference of squares would lose digits."""
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
    """The same call under the planning decompositions, which are all of its norms."""
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


def test_what_is_empty_is_left_to_torch() -> None:
    assert NORMS[aten.native_layer_norm.default](real(3, 0), [0], None, None, 1e-5) is NotImplemented


@pytest.mark.parametrize("call", [lambda x, w, b: F.layer_norm(x, (6,), w, b), lambda x, w, b: F.group_norm(x.transpose(1, 2), 2, w, b)])
def test_half_precision_with_wide_weights(call: Any) -> None:
    """Gradients of float32 weights are not rounded to bfloat16 on the way."""
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
    """In float32 where torch's kernel has that, for which weights are to be in float32, too."""
    dtype = torch.promote_types(x.dtype, torch.float32) if weight is None else weight.dtype
    return torch.zeros(6, dtype=dtype), torch.ones(6, dtype=dtype)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("weight", [None, positive(6).to(torch.bfloat16), positive(6).float()])
def test_statistics_that_a_model_reads_have_torchs_dtype(name: str, weight: Any) -> None:
    """On a CPU; what is computed from them too. The gradients read them in float32."""

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


def test_sums_with_narrow_statistics_are_wide() -> None:
    """As a model's own backward gets them from torch."""
    _, mean, rstd = aten.native_layer_norm(HALF, [5], None, None, 1e-5)
    args = (HALF, HALF, mean, rstd, None, [2])
    mode = FakeTensorMode()
    with mode:
        fake = own.row_norm_sums(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert mean.dtype == torch.bfloat16 and own.row_norm_sums(*args).dtype == fake.dtype == torch.float32
