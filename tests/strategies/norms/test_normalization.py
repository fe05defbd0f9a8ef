"""Normalisation and softmax, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import positive, real
from tests.strategies.shards import KERNELS, check, check_mesh

aten = torch.ops.aten


@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
def test_softmax(op: str) -> None:
    specs = check(f"aten.{op}.default", real(3, 5, 4), -1, False)
    assert {s for s in specs if "S" in s} == {"S(0) -> S(0)", "S(1) -> S(1)"}
    out = getattr(aten, op)(real(5, 4), 1, False)
    specs = check(f"aten.{op}_backward_data.default", real(5, 4) * 2, out, 1, torch.float64)
    assert {"S(0), S(0) -> S(0)", "P, R -> P"} <= specs
    assert "S(1), S(1) -> S(1)" not in specs


@pytest.mark.parametrize("normal", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(normal: int, affine: bool) -> None:
    x, shape = real(3, 5, 4), [3, 5, 4][-normal:]
    w, b = (positive(*shape), real(*shape)) if affine else (None, None)
    specs = check("aten.native_layer_norm.default", x, shape, w, b, 1e-5)
    assert ("S(0), R, R -> S(0), S(0), S(0)" if affine else "S(0) -> S(0), S(0), S(0)") in specs
    _, mean, rstd = aten.native_layer_norm(x, shape, w, b, 1e-5)
    mask = [True, affine, affine]
    specs = check("aten.native_layer_norm_backward.default", x * 2, x, shape, mean, rstd, w, b, mask)
    if affine:
        assert {"S(0), S(0), S(0), S(0), R, R -> S(0), P, P", "P, R, R, R, R, R -> P, P, P"} <= specs


def test_layer_norm_without_some_gradients() -> None:
    x, w = real(3, 5, 4), positive(4)
    _, mean, rstd = aten.native_layer_norm(x, [4], w, w, 1e-5)
    check("aten.native_layer_norm_backward.default", x * 2, x, [4], mean, rstd, w, w, [True, False, True])


def _rms_norm_backward(grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> tuple[Any, Any]:
    """By autograd, from the definition: torch has no CPU kernel for it."""
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    out = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 if weight is None else weight)
    grads = torch.autograd.grad(out, [x] if weight is None else [x, weight], grad)
    return grads[0], grads[1] if mask[1] else None


KERNELS["aten._fused_rms_norm_backward.default"] = _rms_norm_backward


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(weighted: bool) -> None:
    x, w = real(3, 5, 4), positive(4) if weighted else None
    out, rstd = aten._fused_rms_norm(x, [4], w, 1e-5)
    assert any(s.startswith("S(1)") for s in check("aten._fused_rms_norm.default", x, [4], w, 1e-5))
    specs = check("aten._fused_rms_norm_backward.default", out, x, [4], rstd, w, [True, weighted])
    if weighted:
        assert "S(0), S(0), S(0), R -> S(0), P" in specs


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_group_norm(groups: int) -> None:
    x, w, b = real(3, 8, 2, 3), positive(8), real(8)
    args = (3, 8, 6, groups)
    specs = check("aten.native_group_norm.default", x, w, b, *args, 1e-5)
    assert "S(0), R, R -> S(0), S(0), S(0)" in specs
    assert ("S(1), S(0), S(0) -> S(1), S(1), S(1)" in specs) == (groups > 1)
    _, mean, rstd = aten.native_group_norm(x, w, b, *args, 1e-5)
    specs = check("aten.native_group_norm_backward.default", x * 2, x, mean, rstd, w, *args, [True] * 3)
    assert "S(0), S(0), S(0), S(0), R -> S(0), P, P" in specs
    assert ("S(1), S(1), S(1), S(1), S(0) -> S(1), S(0), S(0)" in specs) == (groups > 1)


def test_group_norm_without_weights_and_on_a_mesh() -> None:
    check("aten.native_group_norm.default", real(3, 8, 6), None, None, 3, 8, 6, 4, 1e-5)
    check_mesh("aten.native_group_norm.default", (real(3, 8, 6), positive(8), real(8), 3, 8, 6, 4, 1e-5), mesh=(2, 2))


def _batch_norm(train: bool) -> tuple[Any, ...]:
    return real(5, 6, 3), positive(6), real(6), real(6) * 2, positive(6) * 2, train, 0.1, 1e-5


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm(train: bool) -> None:
    args = _batch_norm(train)
    specs = check("aten._native_batch_norm_legit_functional.default", *args)
    assert any(s.startswith("S(1), S(0), S(0), S(0), S(0)") for s in specs)
    assert any(s.startswith("S(0), R") for s in specs) == (not train)
    _, mean, rstd, _, _ = aten._native_batch_norm_legit_functional(*args)
    x, w, _, running_mean, running_var = args[:5]
    backward = (x * 2, x, w, running_mean, running_var, mean, rstd, train, 1e-5, [True] * 3)
    specs = check("aten.native_batch_norm_backward.default", *backward)
    assert any(s.startswith("S(1), S(1), S(0)") for s in specs)
    assert any(s.startswith("S(0), S(0), R") and s.endswith("S(0), P, P") for s in specs) == (not train)


def test_batch_norm_for_inference() -> None:
    x, w, b, mean, var, _, momentum, eps = _batch_norm(False)
    specs = check("aten._native_batch_norm_legit_no_training.default", x, w, b, mean, var, momentum, eps)
    assert any(s.startswith("S(0), R") for s in specs)


def test_glu() -> None:
    assert "S(0) -> S(0)" in check("aten.glu.default", real(5, 4), 1)
    assert "S(0), S(0) -> S(0)" in check("aten.glu_backward.default", real(5, 2), real(5, 4), 1)
