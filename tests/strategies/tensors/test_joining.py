"""cat, stack, split, unbind, and slices at constant positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import real
from tests.strategies.shards import check


def test_cat() -> None:
    specs = check("aten.cat.default", [real(5, 3), real(5, 2)], 1)
    assert {s for s in specs if "S" in s} == {"S(0), S(0) -> S(0)"}
    assert {"P, P -> P", "P(max), P(max) -> P(max)"} <= specs


def test_cat_skips_an_operand_of_shape_0() -> None:
    assert "S(1), R -> S(1)" in check("aten.cat.default", [real(5, 3), torch.empty(0, dtype=torch.float64)], 0)


def test_cat_with_operands_without_elements() -> None:
    """An empty cache, for example: the result has only elements of the other operand, and shards as that one."""
    assert "R, S(1) -> S(1)" in check("aten.cat.default", [real(5, 0), real(5, 6)], 1)
    assert "S(0), R, R -> S(0)" in check("aten.cat.default", [real(6, 3), real(0, 3), real(0, 3)])
    assert "S(1), S(1) -> S(1)" not in check("aten.cat.default", [real(5, 4), real(5, 4)], 1)


def test_stack_and_unbind() -> None:
    assert "S(1), S(1) -> S(2)" in check("aten.stack.default", [real(5, 3), real(5, 3)], 1)
    specs = check("aten.unbind.int", real(2, 5), 0)
    assert {s for s in specs if "S" in s} == {"S(1) -> S(0), S(0)"}


def test_split() -> None:
    assert "S(1) -> S(1), S(1), S(1)" in check("aten.split.Tensor", real(5, 3), 2)
    assert "S(0) -> S(0), S(0)" in check("aten.split_with_sizes.default", real(5, 3), [1, 2], 1)
    assert "P -> P, P" in check("aten.chunk.default", real(5, 4), 2, -1)


def test_one_piece_that_is_the_whole_tensor() -> None:
    assert "S(0) -> S(0), R" in check("aten.split_with_sizes.default", real(6, 3), [6, 0])
    assert "S(0) -> S(0)" in check("aten.split.Tensor", real(6, 3), 7)
    assert "S(0) -> S(0)" in check("aten.chunk.default", real(6, 3), 1)


@pytest.mark.parametrize(
    ("op", "args", "free"),
    [
        ("slice.Tensor", (1, 0, 2**63 - 1, 2), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("slice.Tensor", (1, 1, 7, 4), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("slice.Tensor", (-1, -7, 8, 2), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("slice.Tensor", (1, 0, 4, 1), {"S(0) -> S(0)"}),
        ("slice.Tensor", (1, 0, 4, 2), {"S(0) -> S(0)"}),
        ("slice.Tensor", (1, 1, 8, 3), {"S(0) -> S(0)"}),
        ("slice_backward.default", ([5, 16], 1, 1, 16, 2), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("slice_backward.default", ([5, 17], 1, 1, 17, 2), {"S(0) -> S(0)"}),
        ("unfold.default", (1, 2, 2), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("unfold.default", (1, 2, 3), {"S(0) -> S(0)"}),
    ],
)
def test_slices_with_a_step_that_divides(op: str, args: tuple[Any, ...], free: set[str]) -> None:
    assert {s for s in check(f"aten.{op}", real(5, 8), *args) if "S" in s} == free


def test_scatter_with_a_step_that_divides() -> None:
    assert "S(1), S(1) -> S(1)" in check("aten.slice_scatter.default", real(5, 8), real(5, 4), 1, 1, 8, 2)
    assert "S(0) -> S(0)" in check("aten.unfold_backward.default", real(4, 3, 2), [8, 3], 0, 2, 2)


@pytest.mark.parametrize(
    ("op", "args", "free"),
    [
        ("slice.Tensor", (0, 1, 3), {"S(1) -> S(1)"}),
        ("slice.Tensor", (0, 0, 2**63 - 1), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("slice.Tensor", (0, -5), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("slice.Tensor", (1, 0, 3, 2), {"S(0) -> S(0)"}),
        ("select.int", (0, 2), {"S(1) -> S(0)"}),
        ("select.int", (-1, -1), {"S(0) -> S(0)"}),
        ("slice_backward.default", ([7, 3], 0, 1, 6, 1), {"S(1) -> S(1)"}),
        ("slice_backward.default", ([5, 3], 0, 0, 5, 1), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ("select_backward.default", ([5, 2, 3], 1, 0), {"S(0) -> S(0)", "S(1) -> S(2)"}),
        ("constant_pad_nd.default", ([1, 2], 0.0), {"S(0) -> S(0)"}),
        ("constant_pad_nd.default", ([1, -1], 1.5), {"S(0) -> S(0)"}),
        ("constant_pad_nd.default", ([0, 0, 1, 0],), {"S(1) -> S(1)"}),
        ("unfold.default", (0, 2, 1), {"S(1) -> S(1)"}),
    ],
)
def test_slices_and_padding(op: str, args: tuple[Any, ...], free: set[str]) -> None:
    assert {s for s in check(f"aten.{op}", real(5, 3), *args) if "S" in s} == free


def test_padding_with_a_value_has_no_sum() -> None:
    assert "P -> P" in check("aten.constant_pad_nd.default", real(5, 3), [1, 2])
    specs = check("aten.constant_pad_nd.default", real(5, 3), [1, 2], 1.0)
    assert "P -> P" not in specs
    assert "P(max) -> P(max)" in specs


def test_scatters() -> None:
    assert "S(1), S(1) -> S(1)" in check("aten.slice_scatter.default", real(5, 3), real(2, 3), 0, 1, 3)
    assert "S(0), S(0) -> S(0)" in check("aten.select_scatter.default", real(5, 3), real(5), 1, 2)


def test_diagonal_and_unfold_backward() -> None:
    assert "S(0) -> S(0)" in check("aten.diagonal.default", real(3, 4, 5), 1, 1, 2)
    assert "S(0) -> S(0)" in check("aten.diagonal_backward.default", real(3, 4), [3, 4, 5], 1, 1, 2)
    assert "S(1) -> S(1)" in check("aten.unfold_backward.default", real(4, 3, 2), [5, 3], 0, 2, 1)
