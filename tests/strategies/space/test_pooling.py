"""Pooling and nearest-neighbour resampling. Windows that do not overlap: space can be sharded. One window for all: a pending sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import real, whole
from tests.strategies.shards import check, check_mesh

aten = torch.ops.aten
X = real(2, 3, 8, 6)
HEIGHT, WIDTH = "S(2) -> S(2)", "S(3) -> S(3)"
POOLS: dict[str, tuple[str, tuple[Any, ...], set[str]]] = {
    "no overlap": ("avg_pool2d", (2,), {HEIGHT, WIDTH}),
    "no overlap, stride": ("avg_pool2d", ([2, 3], [2, 3], 0, True, False), {HEIGHT, WIDTH}),
    "divisor": ("avg_pool2d", ([2, 6], [2, 6], 0, False, True, 5), {HEIGHT, "S(3) -> P"}),
    "overlapping height": ("avg_pool2d", ([2, 2], [1, 2]), {WIDTH}),
    "left over": ("avg_pool2d", ([3, 3],), {WIDTH}),
    "padded": ("avg_pool2d", (2, 2, [1, 0]), {WIDTH}),
    "spanning": ("avg_pool2d", ([8, 3],), {"S(2) -> P", WIDTH}),
    "all": ("avg_pool2d", ([8, 6], [1, 1]), {"S(2) -> P", "S(3) -> P"}),
    "adaptive": ("_adaptive_avg_pool2d", ([4, 4],), {HEIGHT}),
    "adaptive, to one": ("_adaptive_avg_pool2d", ([1, 3],), {"S(2) -> P", WIDTH}),
    "nearest": ("upsample_nearest2d", ([16, 18],), {HEIGHT, WIDTH}),
    "nearest, not an integer factor": ("upsample_nearest2d", ([16, 15],), {HEIGHT}),
    "nearest, scales": ("upsample_nearest2d", ([16, 18], 2.0, 3.0), {HEIGHT, WIDTH}),
    "nearest, another scale": ("upsample_nearest2d", ([16, 18], 2.1, 3.0), {WIDTH}),
    "nearest, vec": ("upsample_nearest2d.vec", (None, [2.0, 3.0]), {HEIGHT, WIDTH}),
    "nearest, vec with a size": ("upsample_nearest2d.vec", ([16, 18], None), {HEIGHT, WIDTH}),
    "nearest, exact": ("_upsample_nearest_exact2d", ([24, 12],), {HEIGHT, WIDTH}),
    "nearest, gradient": ("upsample_nearest2d_backward", ([8, 6], [2, 3, 4, 2]), {HEIGHT, WIDTH}),
    "nearest, gradient of one": ("upsample_nearest2d_backward", ([8, 6], [2, 3, 1, 2]), {"S(2) -> P", WIDTH}),
}


@pytest.mark.parametrize(("op", "args", "space"), POOLS.values(), ids=POOLS)
def test_which_space_dims_can_be_sharded(op: str, args: tuple[Any, ...], space: set[str]) -> None:
    specs = check(f"aten.{op}" if "." in op else f"aten.{op}.default", X, *args)
    assert {s for s in specs if "S(2)" in s or "S(3)" in s} == space


def test_nearest_from_one_element_is_an_expansion() -> None:
    assert "R -> S(2)" in check("aten.upsample_nearest2d.default", real(2, 3, 1, 4), [8, 8])
    assert "R -> S(2)" not in check("aten.upsample_nearest2d.vec", real(2, 3, 1, 4), None, [8.0, 2.0])


@pytest.mark.parametrize(("args", "spec"), [(([2, 3],), "S(2), S(2) -> S(2)"), (([8, 3], [1, 3]), "R, S(2) -> S(2)")])
def test_gradients_of_means(args: Any, spec: str) -> None:
    out = aten.avg_pool2d(X, *args)
    kernel = args[0]
    stride = args[1] if len(args) > 1 else []
    assert spec in check("aten.avg_pool2d_backward.default", out * 2, X, kernel, stride, [0, 0], False, True, None)


def test_gradients_of_adaptive_means() -> None:
    specs = check("aten._adaptive_avg_pool2d_backward.default", real(2, 3, 4, 1), X)
    assert {"S(2), S(2) -> S(2)", "R, S(3) -> S(3)", "P, R -> P"} <= specs


def test_max_pooling_with_indices_into_the_whole_image() -> None:
    specs = check("aten.max_pool2d_with_indices.default", X, [2, 3])
    assert {"S(2) -> S(2), S(2)", "S(3) -> S(3), S(3)"} <= specs
    assert "S(2) -> S(2), S(2)" not in check("aten.max_pool2d_with_indices.default", X, [2, 3], [1, 3])
    assert not any(s.startswith("S(2)") for s in check("aten.max_pool2d_with_indices.default", X, [8, 3])), "one index cannot be pending"
    out, places = aten.max_pool2d_with_indices(X, [2, 3])
    args = ([2, 3], [2, 3], [0, 0], [1, 1], False, places)
    specs = check("aten.max_pool2d_with_indices_backward.default", out * 2, X, *args)
    assert {"S(2), S(2), S(2) -> S(2)", "S(3), S(3), S(3) -> S(3)", "P, R, R -> P"} <= specs


def test_adaptive_maxima() -> None:
    assert "S(2) -> S(2), S(2)" in check("aten.adaptive_max_pool2d.default", X, [4, 4])
    out, places = aten.adaptive_max_pool2d(X, [4, 3])
    specs = check("aten.adaptive_max_pool2d_backward.default", out * 2, X, places)
    assert {"S(2), S(2), S(2) -> S(2)", "S(3), S(3), S(3) -> S(3)"} <= specs
    volume = real(2, 2, 4, 4, 3)
    out, places = aten.adaptive_max_pool3d(volume, [2, 2, 3])
    specs = check("aten.adaptive_max_pool3d_backward.default", out, volume, places)
    assert {"S(2), S(2), S(2) -> S(2)", "S(3), S(3), S(3) -> S(3)"} <= specs


def test_means_of_integers_are_rounded_and_pass_no_sum() -> None:
    specs = check("aten.avg_pool2d.default", whole(9, 2, 3, 8, 6), [8, 3])
    assert {s for s in specs if "P" in s or "S(2)" in s} == set()
    assert WIDTH in specs


def test_one_dim_of_space() -> None:
    line = real(2, 3, 8)
    assert "S(2) -> P" in check("aten.avg_pool1d.default", line, [8])
    assert HEIGHT in check("aten.adaptive_avg_pool1d.default", line, [4])
    assert "S(2) -> S(2), S(2)" in check("aten.adaptive_max_pool1d.default", line, [4])


def test_an_image_sharded_along_both_dims() -> None:
    specs = {str(s) for s in check_mesh("aten.max_pool2d_with_indices.default", (real(1, 8, 8), [2, 2]), mesh=(2, 2))}
    assert {"S(1)S(2) -> S(1)S(2), S(1)S(2)", "S(2)S(2) -> S(2)S(2), S(2)S(2)"} <= specs
    assert "S(1)S(2) -> S(1)P" in {str(s) for s in check_mesh("aten.avg_pool2d.default", (real(2, 8, 6), [2, 6]), mesh=(2, 2))}
