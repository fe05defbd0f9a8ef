"""Operators that no other test covers: one call of each, in every option, against the operator itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import positive, real, whole, yes_no
from tests.strategies.shards import check

X, Y, Z = real(5, 3), positive(5, 3), positive(3)
UNIT = real(5, 3).sigmoid()
N, M = whole(9, 5, 3) + 1, whole(7, 5, 3) + 1
LINE, PLANE, SPACE = real(3, 5, 4), real(3, 5, 4, 4), real(2, 3, 2, 4, 4)
PLAIN = {
    "acos asin atanh erfinv logit special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri": (UNIT,),
    "celu isneginf isposinf rad2deg relu6 conj_physical resolve_conj resolve_neg lift_fresh log_sigmoid_forward _neg_view": (X,),
    "bitwise_not": (N,),
    "gcd lcm logical_and logical_or logical_xor": (N, M),
    "fmax fmin logaddexp2 special_zeta complex polar": (Y, Y + 1),
    "clamp_min clamp_max": (X, 0.2),
    "_prelu_kernel": (X, Z),
    "threshold": (X, 0.1, 2.0),
    "polygamma": (1, Y),
    "empty_like zeros_like ones_like": (X,),
    "new_ones": (X, [5, 2]),
    "cummin": (X, 0),
    "kthvalue": (X, 2),
    "mode": (X,),
    "diagonal_copy": (X,),
    "unsafe_split_with_sizes split_with_sizes_copy": (X, [2, 3], 0),
    "hardsigmoid_backward": (X, Y),
    "hardshrink_backward softshrink_backward": (X, Y, 0.5),
    "native_dropout_backward": (X, yes_no(5, 3), 2.0),
    "elu_backward": (X, 1.0, 1.0, 1.0, False, Y),
    "logit_backward": (X, UNIT),
    "_safe_softmax": (X, 1),
    "linspace logspace": (0, 1, 5),
    "tril_indices triu_indices": (3, 4),
    "reflection_pad1d replication_pad1d": (LINE, [1, 1]),
    "replication_pad3d reflection_pad3d": (SPACE, [1] * 6),
    "reflection_pad2d_backward replication_pad2d_backward": (real(3, 5, 6, 6), PLANE, [1] * 4),
    "reflection_pad1d_backward replication_pad1d_backward": (real(3, 5, 6), LINE, [1, 1]),
    "avg_pool1d": (LINE, [2]),
    "avg_pool3d": (SPACE, [2, 2, 2]),
    "_adaptive_avg_pool3d adaptive_max_pool3d": (SPACE, [2, 2, 2]),
    "_adaptive_avg_pool3d_backward": (SPACE, SPACE),
    "max_pool3d_with_indices": (SPACE, [2, 2, 2]),
    "upsample_nearest1d _upsample_nearest_exact1d": (LINE, [8]),
    "upsample_linear1d": (LINE, [8], False),
    "upsample_nearest3d _upsample_nearest_exact3d": (SPACE, [4, 8, 8]),
    "upsample_trilinear3d": (SPACE, [4, 8, 8], False),
    "upsample_nearest1d_backward _upsample_nearest_exact1d_backward": (LINE, [4], [3, 5, 2]),
    "upsample_linear1d_backward": (LINE, [4], [3, 5, 2], False),
    "_upsample_nearest_exact2d_backward": (PLANE, [4, 4], [3, 5, 2, 2]),
    "upsample_bicubic2d_backward": (PLANE, [4, 4], [3, 5, 2, 2], False),
    "upsample_nearest3d_backward _upsample_nearest_exact3d_backward": (SPACE, [2, 4, 4], [2, 3, 1, 2, 2]),
    "upsample_trilinear3d_backward": (SPACE, [2, 4, 4], [2, 3, 1, 2, 2], False),
}
OVERLOADS = {
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor": (N, M),
    "bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar": (N, 3),
    "bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor": (3, N),
    "clamp.Tensor": (X, -Z, Z),
    "clamp_min.Tensor clamp_max.Tensor copysign.Tensor fmod.Tensor remainder.Tensor sub.Tensor rsub.Tensor pow.Tensor_Tensor": (Y, Z),
    "xlogy.Tensor ldexp.Tensor": (Y, Z),
    "copysign.Scalar gt.Scalar le.Scalar ne.Scalar xlogy.Scalar_Other": (Y, 2),
    "remainder.Scalar_Tensor pow.Scalar xlogy.Scalar_Self": (2, Y),
    "lerp.Tensor": (X, Y, UNIT),
    "where.ScalarOther": (yes_no(5, 1), X, 0.5),
    "where.ScalarSelf": (yes_no(5, 1), 0.5, X),
    "where.Scalar": (yes_no(5, 3), 1.0, 0.5),
    "fill.Scalar": (X, 2.0),
    "fill.Tensor": (X, torch.tensor(2.0, dtype=torch.float64)),
    "any.dims all.dims": (yes_no(5, 3), [0]),
    "var.dim var_mean.dim std.dim": (X, [0], True, True),
    "median.dim": (X, 0),
    "select_copy.int slice_copy.Tensor": (X, 1, 1),
    "unbind_copy.int": (X, 1),
    "split_copy.Tensor unsafe_split.Tensor": (X, 2, 0),
    "_unsafe_index.Tensor": (X, [whole(5, 4)]),
    "to.dtype": (X, torch.float32),
    "eye.m": (3, 4),
    "upsample_nearest1d.vec": (LINE, None, [2.0]),
    "upsample_bilinear2d.vec upsample_bicubic2d.vec": (PLANE, None, False, [2.0, 2.0]),
    "upsample_nearest3d.vec": (SPACE, None, [2.0, 2.0, 2.0]),
}
CASES = [(f"aten.{op}.default", args) for ops, args in PLAIN.items() for op in ops.split()]
CASES += [(f"aten.{op}", args) for ops, args in OVERLOADS.items() for op in ops.split()]


@pytest.mark.parametrize(("op", "args"), CASES, ids=[f"{op}-{i}" for i, (op, _) in enumerate(CASES)])
def test_operator(op: str, args: tuple[Any, ...]) -> None:
    specs = check(op, *args)
    assert any("R" in s for s in specs)


def test_rounded_quotients_pass_no_sum() -> None:
    for mode in ("floor", "trunc"):
        assert "P, R -> P" not in check("aten.div.Tensor_mode", X, Y, rounding_mode=mode)
        assert "P -> P" not in check("aten.div.Scalar_mode", X, 2, rounding_mode=mode)
    check("aten.round.decimals", X, decimals=1)


def test_complex_numbers() -> None:
    z = torch.complex(X, Y)
    for op in ("aten._conj_physical.default", "aten.conj_physical.default", "aten.real.default", "aten.imag.default"):
        assert "P -> P" in check(op, z)


def test_backwards_that_need_their_forward() -> None:
    aten = torch.ops.aten
    out, buffer = aten.log_sigmoid_forward(X)
    assert "P, R, R -> P" in check("aten.log_sigmoid_backward.default", out, X, buffer)
    out, indices = aten.max_pool3d_with_indices(SPACE, [2, 2, 2])
    args = ([2] * 3, [2] * 3, [0] * 3, [1] * 3, False, indices)
    assert "S(1), S(1), S(1) -> S(1)" in check("aten.max_pool3d_with_indices_backward.default", out, SPACE, *args)
    out, indices = aten.adaptive_max_pool3d(SPACE, [1, 2, 2])
    check("aten.adaptive_max_pool3d_backward.default", out, SPACE, indices)
    out = aten.avg_pool3d(SPACE, [2] * 3)
    check("aten.avg_pool3d_backward.default", out, SPACE, [2] * 3, [2] * 3, [0] * 3, False, True, None)
    x, target = PLANE.log_softmax(1), whole(5, 3, 4, 4)
    loss, total = aten.nll_loss2d_forward(x, target, None, 2, -100)
    check("aten.nll_loss2d_backward.default", loss, x, target, None, 2, -100, total)


def test_conversions_and_stable_sort() -> None:
    check("prims.convert_element_type.default", X, torch.float32)
    check("aten.argsort.stable", X, stable=True, dim=0)
    check("aten._reshape_alias.default", real(4, 6), [24], [1])
    check("aten.copy_.default", real(5, 3), Y)
    check("aten._unsafe_index_put.default", X, [whole(5, 4)], real(4, 3), True)
    check("aten.native_batch_norm.default", real(5, 6, 3), None, None, real(6), positive(6), False, 0.1, 1e-5)


@pytest.mark.parametrize(("op", "args"), [("empty.memory_format", ([5, 3],)), ("new_empty.default", (X, [5, 3]))])
def test_factories(op: str, args: tuple[Any, ...]) -> None:
    assert any(s.endswith("-> S(0)") for s in check(f"aten.{op}", *args))
