"""The parts of layer and group norm: every dim can be sharded; sums over a sharded dim that is normalised stay pending."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard._torch_compat.fakes import FakeTensorMode
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
    assert not any("P, " in s for s in specs), "the spread is not linear"
    specs = check("fxshard.row_norm_sums.default", X * 2, X, MEAN, RSTD, WEIGHT, DIMS)
    assert {"S(1), S(1), S(1), S(1), R -> S(2)", "S(2), S(2), R, R, S(0) -> P", "P, R, R, R, R -> P"} <= specs


@pytest.mark.parametrize("weight, bias", [(WEIGHT, BIAS), (WEIGHT, None), (None, BIAS), (None, None)])
def test_statistics_are_applied_to_shards(weight: Any, bias: Any) -> None:
    specs = check("fxshard.row_normalise.default", X, MEAN, RSTD, weight, bias)
    assert {s.split(",")[0] for s in specs if "P" not in s} == {"R", "S(0)", "S(1)", "S(2)"}
    sums = own.row_norm_sums(X * 2, X, MEAN, RSTD, weight, DIMS)
    specs = check("fxshard.row_norm_backward.default", X * 2, X, MEAN, RSTD, weight, sums, COUNT)
    assert {s.partition(",")[0] for s in specs} == {"R", "S(0)", "S(1)", "S(2)", "P", "P(avg)"}


def test_gradients_of_weights_are_sums_over_rows() -> None:
    specs = check("fxshard.row_norm_weight.default", X * 2, X, MEAN, RSTD, [0, 1])
    assert {"S(0), S(0), S(0), S(0) -> P", "S(2), S(2), R, R -> S(0)", "P, R, R, R -> P"} <= specs
    assert {"S(1) -> P", "S(2) -> S(0)", "P -> P"} <= check("fxshard.row_norm_weight.default", X, None, None, None, [0, 1])


def test_rows_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("fxshard.row_spread.default", (X, TOTAL, COUNT, DIMS), mesh=(2, 2))}
    assert {"S(0)S(2), S(0)R -> S(0)P", "S(2)S(2), RR -> PP"} <= specs


def test_sums_with_bfloat16_statistics_are_float32() -> None:
    """The backward of a model may get such statistics from torch."""
    half = (real(4, 6, 5) * 2 + 3).to(torch.bfloat16)
    _, mean, rstd = aten.native_layer_norm(half, [5], None, None, 1e-5)
    args = (half, half, mean, rstd, None, [2])
    mode = FakeTensorMode()
    with mode:
        fake = own.row_norm_sums(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert mean.dtype == torch.bfloat16 and own.row_norm_sums(*args).dtype == fake.dtype == torch.float32
