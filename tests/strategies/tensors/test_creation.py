"""Tensors from literals, copies and casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import real
from tests.strategies.shards import check, check_mesh


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("full.default", ([5, 3], 2.0)),
        ("zeros.default", ([5, 3],)),
        ("ones.default", ([5, 3],)),
    ],
)
def test_every_dim_of_a_factory_can_be_sharded(op: str, args: tuple[Any, ...]) -> None:
    assert check(f"aten.{op}", *args) == {" -> R", " -> S(0)", " -> S(1)"}


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("arange.default", (7,)),
        ("arange.start", (3, 9)),
        ("arange.start_step", (3, 20, 4)),
        ("arange.start_step", (2.0, -1.0, -0.5)),
        ("arange.default", (5.0,)),
    ],
)
def test_arange_counts_from_the_offset_of_its_shard(op: str, args: tuple[Any, ...]) -> None:
    assert check(f"aten.{op}", *args) == {" -> R", " -> S(0)"}
    check_mesh(f"aten.{op}", args, {"dtype": torch.float32}, mesh=(2, 2))


def test_empty_strided_keeps_the_order_of_strides() -> None:
    check("aten.new_empty_strided.default", real(2), [5, 3], [1, 5])
    check("aten.empty_strided.default", [5, 3], [3, 1])


def test_like_another_tensor() -> None:
    assert "R -> S(0)" in check("aten.new_zeros.default", real(2), [5, 3])
    assert "R -> S(0)" in check("aten.new_full.default", real(2), [5, 3], 1.5)
    assert check("aten.full_like.default", real(5), 2) == {"R -> R", "S(0) -> S(0)"}
    check("aten.scalar_tensor.default", 2.0)


@pytest.mark.parametrize("op", ["clone", "detach", "alias", "lift_fresh_copy", "contiguous"])
def test_copies_pass_everything(op: str) -> None:
    assert {"P -> P", "P(max) -> P(max)", "S(0) -> S(0)"} <= check(f"aten.{op}.default", real(5, 3))


def test_copy_into_shares_the_layout() -> None:
    assert {"S(0), S(0) -> S(0)", "P, P -> P"} <= check("aten.copy.default", real(5, 3), real(5, 3))


def test_view_as_another_dtype() -> None:
    assert check("aten.view.dtype", real(4, 6), torch.int64) == {"R -> R", "S(0) -> S(0)", "S(1) -> S(1)"}
    assert check("aten.view.dtype", real(4, 6), torch.int32) == {"R -> R"}


def test_a_shard_of_eye_has_the_diagonal_of_the_whole() -> None:
    assert check("aten.eye.default", 4) == {" -> R", " -> S(0)", " -> S(1)"}
    check_mesh("aten.eye.m", (5, 3), {"dtype": torch.int64})
