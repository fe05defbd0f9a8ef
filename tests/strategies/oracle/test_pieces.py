"""Shards and pending parts of a tensor for simulated ranks, and which placements a list of pieces has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard.strategies.engine.conversion import identity
from fxshard.strategies.oracle.pieces import close, cut, holds, parts, valid_placements
from tests.strategies.samples import real, whole

REDUCE = {"sum": sum, "avg": lambda p: sum(p) / len(p), "product": math.prod}


@given(op=st.sampled_from(["sum", "avg", "product"]), ranks=st.integers(2, 4), seed=st.integers(0, 9))
def test_parts_reduce_to_the_tensor(op: str, ranks: int, seed: int) -> None:
    x = real(4, 3)
    found = parts(x, op, ranks, seed)
    torch.testing.assert_close(REDUCE[op](found), x)
    assert not any(torch.equal(found[0], p) for p in found[1:])


@given(op=st.sampled_from(["max", "min"]), seed=st.integers(0, 9))
def test_parts_of_an_extreme(op: str, seed: int) -> None:
    for x in (real(4, 3), whole(9, 4, 3)):
        stacked = torch.stack(parts(x, op, 3, seed))
        assert torch.equal(stacked.amax(0) if op == "max" else stacked.amin(0), x)


@pytest.mark.parametrize("op", ["max", "min"])
def test_an_extreme_may_hide_a_zero(op: str) -> None:
    x = real(20, 3)
    hides = (torch.stack(parts(x, op, 3, 0)) == 0).any(0)
    assert hides.any() and (x[hides] > 0 if op == "max" else x[hides] < 0).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
@pytest.mark.parametrize("op", ["sum", "product"])
def test_parts_of_integers_wrap_around(op: str, dtype: torch.dtype) -> None:
    x = whole(9, 20).to(dtype)
    stacked = torch.stack(parts(x, op, 3, 1))
    assert torch.equal(stacked.sum(0, dtype=dtype) if op == "sum" else stacked.prod(0, dtype=dtype), x)


def test_parts_of_zero_sum_to_zero_exactly() -> None:
    assert torch.equal(sum(parts(torch.zeros(50, dtype=torch.float64), "sum", 4, 0)), torch.zeros(50, dtype=torch.float64))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max")])
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_placement_of_pieces_is_recognised(placement: object, ranks: int) -> None:
    x = real(5, 2)
    own = [Partial(op) for op in ("avg", "max", "min")] if placement == Replicate() else []
    assert valid_placements(cut(x, placement, ranks, 0), x) == (placement, *own)  # type: ignore[arg-type]  # any placement


def test_a_missing_piece_must_be_empty() -> None:
    x = real(3, 2)
    pieces = cut(x, Shard(0), 4, 0)
    assert valid_placements([*pieces[:3], None], x) == (Shard(0),)
    assert valid_placements([None, *pieces[1:]], x) == ()
    assert Replicate() not in valid_placements([x, x, None], x)


def test_close_is_relative_to_the_greatest_number() -> None:
    x = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert close(x + 1e-4, x)
    assert not close(x + 1.0, x)
    assert not close(x.float(), x)


def test_the_tolerance_of_a_sum_is_relative_to_its_parts() -> None:
    pieces, nothing = [torch.tensor([n], dtype=torch.float64) for n in (0.3, -0.1, -0.2)], torch.zeros(1, dtype=torch.float64)
    assert not torch.equal(sum(pieces), nothing)
    assert holds(pieces, nothing, Partial("sum"))
    assert not holds([pieces[0] + 1e-12, *pieces[1:]], nothing, Partial("sum"))


def test_identities() -> None:
    assert identity("max", torch.int8) == -128
    assert identity("min", torch.float32) == math.inf
    assert identity("max", torch.bool) is False
    assert identity("product", torch.int64) == 1
