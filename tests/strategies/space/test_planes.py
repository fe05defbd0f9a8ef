"""Pooling, resampling and padding of images, sharded by batch and channel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import real
from tests.strategies.shards import check

aten = torch.ops.aten
FREE = {"S(0) -> S(0)", "S(1) -> S(1)"}


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("avg_pool2d.default", ([2, 2],)),
        ("_adaptive_avg_pool2d.default", ([2, 3],)),
        ("_adaptive_avg_pool2d.default", ([1, 1],)),
        ("upsample_nearest2d.default", ([8, 10],)),
        ("upsample_nearest2d.vec", (None, [2.0, 2.0])),
        ("upsample_bilinear2d.default", ([8, 10], False)),
        ("upsample_bicubic2d.default", ([8, 10], True)),
        ("reflection_pad2d.default", ([1, 1, 1, 1],)),
        ("replication_pad2d.default", ([1, 1, 1, 1],)),
    ],
)
def test_linear_operators_on_images(op: str, args: tuple[Any, ...]) -> None:
    specs = check(f"aten.{op}", real(3, 5, 4, 6), *args)
    assert specs >= FREE
    assert "P -> P" in specs


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("upsample_nearest2d_backward", ([4, 6], [3, 5, 2, 3])),
        ("upsample_bilinear2d_backward", ([4, 6], [3, 5, 2, 3], False)),
    ],
)
def test_resampling_backward(op: str, args: tuple[Any, ...]) -> None:
    assert check(f"aten.{op}.default", real(3, 5, 4, 6), *args) >= FREE


def test_max_pool() -> None:
    x = real(3, 5, 4, 6)
    assert "S(1) -> S(1), S(1)" in check("aten.max_pool2d_with_indices.default", x, [2, 2])
    out, indices = aten.max_pool2d_with_indices(x, [2, 2])
    args = ([2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    specs = check("aten.max_pool2d_with_indices_backward.default", out * 2, x, *args)
    assert {"S(0), S(0), S(0) -> S(0)", "P, R, R -> P"} <= specs


def test_average_pool_backward() -> None:
    x = real(3, 5, 4, 6)
    out = aten.avg_pool2d(x, [2, 2])
    args = ([2, 2], [2, 2], [0, 0], False, True, None)
    assert "S(1), S(1) -> S(1)" in check("aten.avg_pool2d_backward.default", out, x, *args)
    out = aten._adaptive_avg_pool2d(x, [2, 2])
    assert "S(1), S(1) -> S(1)" in check("aten._adaptive_avg_pool2d_backward.default", out, x)
    out, indices = aten.adaptive_max_pool2d(x, [2, 2])
    assert "S(0), S(0), S(0) -> S(0)" in check("aten.adaptive_max_pool2d_backward.default", out, x, indices)


def test_pixel_shuffle_shards_between_pixels() -> None:
    specs = check("aten.pixel_shuffle.default", real(3, 8, 4, 4), 2)
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)", "S(3) -> S(3)"} <= specs
    assert {"S(1) -> S(1)", "S(2) -> S(2)"} <= check("aten.pixel_unshuffle.default", real(2, 8, 8), 2)


def test_im2col_and_col2im() -> None:
    assert "S(1) -> S(1)" in check("aten.im2col.default", real(3, 4, 5, 4), [2, 2], [1, 1], [0, 0], [1, 1])
    args = ([5, 4], [2, 2], [1, 1], [0, 0], [1, 1])
    assert "S(0) -> S(0)" in check("aten.col2im.default", real(3, 16, 12), *args)


def test_grid_sampler() -> None:
    x, grid = real(3, 5, 4, 4), real(3, 2, 6, 2).tanh()
    specs = check("aten.grid_sampler_2d.default", x, grid, 0, 0, False)
    assert {"S(1), R -> S(1)", "R, S(2) -> S(3)"} <= specs
    args = (0, 0, False, [True, True])
    specs = check("aten.grid_sampler_2d_backward.default", real(3, 5, 2, 6), x, grid, *args)
    assert {"S(1), S(1), R -> S(1), P", "S(3), R, S(2) -> P, S(2)"} <= specs


def test_unbatched_images() -> None:
    specs = check("aten.avg_pool2d.default", real(5, 4, 6), [3, 2])
    assert {s for s in specs if "S" in s} == {"S(0) -> S(0)", "S(2) -> S(2)"}


def test_im2col_of_windows_that_do_not_overlap() -> None:
    assert "S(2) -> S(2)" in check("aten.im2col.default", real(3, 2, 8, 6), [2, 3], [1, 1], [0, 1], [2, 2])
    assert "S(2) -> S(2)" in check("aten.col2im.default", real(3, 12, 16), [8, 8], [2, 3], [1, 1], [0, 1], [2, 2])
    assert "S(2) -> S(2)" not in check("aten.im2col.default", real(3, 2, 8, 6), [2, 2], [1, 1], [0, 0], [1, 2])
