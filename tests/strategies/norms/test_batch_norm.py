"""The parts of batch norm in training: batch and space can be sharded, and leave pending sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import positive, real
from tests.strategies.shards import check, check_mesh

own = torch.ops.fxshard
X, WEIGHT, BIAS = real(5, 6, 3) * 2 + 50, positive(6), real(6)
COUNT = 15
TOTAL = own.channel_sum(X)
SPREAD = own.channel_spread(X, TOTAL, COUNT)
MEAN, RSTD = own.batch_statistics(TOTAL, SPREAD, COUNT, 1e-5)


def test_sums_of_shards_are_pending() -> None:
    specs = check("fxshard.channel_sum.default", X)
    assert {"S(0) -> P", "S(1) -> S(0)", "S(2) -> P", "P -> P"} <= specs
    specs = check("fxshard.channel_spread.default", X, TOTAL, COUNT)
    assert {"S(0), R -> P", "S(1), S(0) -> S(0)", "S(2), R -> P"} <= specs
    assert not any("P, " in s for s in specs), "the spread is not linear"
    specs = check("fxshard.batch_norm_sums.default", X * 2, X, MEAN, RSTD)
    assert {"S(0), S(0), R, R -> P", "S(1), S(1), S(0), S(0) -> S(1)", "P, R, R, R -> P"} <= specs


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_are_applied_to_shards(affine: bool) -> None:
    weight, bias = (WEIGHT, BIAS) if affine else (None, None)
    specs = check("fxshard.normalise.default", X, MEAN, RSTD, weight, bias)
    assert any(s.startswith("S(0), R, R") and s.endswith("-> S(0)") for s in specs)
    sums = own.batch_norm_sums(X * 2, X, MEAN, RSTD)
    specs = check("fxshard.batch_norm_backward.default", X * 2, X, weight, MEAN, RSTD, sums, COUNT)
    assert {s.partition(",")[0] for s in specs} == {"R", "S(0)", "S(1)", "S(2)", "P", "P(avg)"}


def test_statistics_by_channel() -> None:
    assert "S(0), S(0) -> S(0), S(0)" in check("fxshard.batch_statistics.default", TOTAL, SPREAD, COUNT, 1e-5)
    specs = check("fxshard.running_statistics.default", BIAS, WEIGHT, TOTAL, SPREAD, COUNT, 0.1)
    assert specs == {"R, R, R, R -> R, R", "S(0), S(0), S(0), S(0) -> S(0), S(0)"}


def test_a_batch_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("fxshard.channel_spread.default", (X, TOTAL, COUNT), mesh=(2, 2))}
    assert {"S(0)S(1), RS(0) -> PS(0)", "S(0)S(0), RR -> PP"} <= specs


def test_the_parts_are_torchs_batch_norm() -> None:
    """Also for values far from zero, where a difference of squares would lose digits."""
    for x in (X, X * 1e-3 + 1e4, real(8, 6)):
        count = x.numel() // 6
        running = (torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype))
        want: Any = torch.ops.aten._native_batch_norm_legit_functional(x, WEIGHT, BIAS, *running, True, 0.1, 1e-5)
        total = own.channel_sum(x)
        spread = own.channel_spread(x, total, count)
        mean, rstd = own.batch_statistics(total, spread, count, 1e-5)
        moved = own.running_statistics(*running, total, spread, count, 0.1)
        have = (own.normalise(x, mean, rstd, WEIGHT, BIAS), mean, rstd, *moved)
        torch.testing.assert_close(have, tuple(want), rtol=1e-9, atol=1e-9)
