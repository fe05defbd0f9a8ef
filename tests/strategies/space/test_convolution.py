"""Convolutions sharded by batch, groups, channels, and by space if windows do not overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard.mesh.mesh import Mesh
from fxshard.strategies import op_strategy
from tests.strategies.samples import real
from tests.strategies.shards import call_for, check, check_mesh

aten = torch.ops.aten


def _args(groups: int = 1, bias: bool = True, transposed: bool = False) -> tuple[Any, ...]:
    weight = real(4, 6 // groups, 3, 2) if transposed else real(6, 4 // groups, 3, 2)
    return real(3, 4, 5, 4), weight, real(6) if bias else None, [1, 2], [1, 0], [1, 1], transposed, [0, 0], groups


def test_every_channel_of_a_plain_convolution() -> None:
    specs = check("aten.convolution.default", *_args())
    assert {"S(0), R, R -> S(0)", "R, S(0), S(0) -> S(1)", "S(1), S(1), P -> P", "P, R, P -> P"} <= specs
    assert not any("S(2)" in s for s in specs), "windows overlap along height"


def test_without_bias() -> None:
    assert {"S(1), S(1) -> P", "P, R -> P", "R, P -> P"} <= check("aten.convolution.default", *_args(bias=False))


def test_groups() -> None:
    specs = check("aten.convolution.default", *_args(groups=2))
    assert "S(1), S(0), S(0) -> S(1)" in specs
    assert "R, S(0), S(0) -> S(1)" not in specs


def test_depthwise() -> None:
    args = real(3, 4, 5), real(8, 1, 3), real(8), [1], [1], [1], False, [0], 4
    assert "S(1), S(0), S(0) -> S(1)" in check("aten.convolution.default", *args)


def test_a_transposed_convolution() -> None:
    specs = check("aten.convolution.default", *_args(transposed=True))
    assert {"S(0), R, R -> S(0)", "R, S(1), S(0) -> S(1)", "S(1), S(0), P -> P", "S(3), R, R -> S(3)"} <= specs
    assert not any("S(2)" in s for s in specs)
    specs = check("aten.convolution.default", *_args(groups=2, transposed=True))
    assert {"S(0), R, R -> S(0)", "S(1), S(0), S(0) -> S(1)"} <= specs
    assert "R, S(1), S(0) -> S(1)" not in specs


SPACE: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], str]] = {
    "patches": ((2, 3, 8, 6), (4, 3, 2, 3), ([2, 3], [0, 0], [1, 1], False, [0, 0], 1), "S(2), R, R -> S(2)"),
    "1x1 kernel": ((2, 3, 5, 6), (4, 3, 1, 1), ([1, 1], [0, 0], [2, 2], False, [0, 0], 1), "S(3), R, R -> S(3)"),
    "1x1 kernel, grouped": ((2, 4, 5), (4, 2, 1), ([1], [0], [1], False, [0], 2), "S(2), R, R -> S(2)"),
    "one window": ((2, 3, 4, 6), (4, 3, 4, 6), ([4, 6], [0, 0], [1, 1], False, [0, 0], 1), "S(2), S(2), P -> P"),
    "transposed": ((2, 3, 4, 5), (3, 4, 2, 3), ([2, 3], [0, 0], [1, 1], True, [0, 0], 1), "S(2), R, R -> S(2)"),
    "transposed from one element": ((2, 3, 1), (3, 4, 5), ([5], [0], [1], True, [0], 1), "R, S(2), R -> S(2)"),
}


@pytest.mark.parametrize(("shape", "weight", "rest", "spec"), SPACE.values(), ids=SPACE)
def test_space_can_be_sharded_if_windows_do_not_overlap(shape: Any, weight: Any, rest: Any, spec: str) -> None:
    x, w = real(*shape), real(*weight)
    assert spec in check("aten.convolution.default", x, w, real(4), *rest)
    out = torch.ops.aten.convolution(x, w, None, *rest)
    specs = check("aten.convolution_backward.default", out * 2, x, w, [4], *rest, [True] * 3)
    assert any(s.startswith("S(2), ") or ", S(2)" in s for s in specs)


OVERLAPPING = {
    "kernel": ([2], [0], [1], False, [0], 1),
    "padding": ([3], [3], [1], False, [0], 1),
    "dilation": ([3], [0], [2], False, [0], 1),
    "output padding": ([3], [0], [1], True, [1], 1),
}


@pytest.mark.parametrize("rest", OVERLAPPING.values(), ids=OVERLAPPING)
def test_space_is_not_sharded_if_windows_do_not_tile_with_a_reason(rest: Any) -> None:
    args = (real(2, 4, 9), real(4, 4, 3), None, *rest)
    assert not any("S(2)" in s for s in check("aten.convolution.default", *args))
    call, _ = call_for("aten.convolution.default", args, {}, [aten.convolution(*args)])
    assert "overlap" in op_strategy(call, Mesh({"a": 2})).reason


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, True], [True, True, False], [True, False, False]])
def test_backward(groups: int, transposed: bool, mask: list[bool]) -> None:
    x, weight, bias, *rest = _args(groups=groups, transposed=transposed)
    out = aten.convolution(x, weight, bias, *rest)
    specs = check("aten.convolution_backward.default", out * 2, x, weight, [6], *rest, mask)
    assert any(s.startswith("S(0), S(0), R") for s in specs)


def test_the_gradient_of_the_bias_is_replicated_with_sharded_input_channels() -> None:
    x, weight, bias, *rest = _args()
    out = aten.convolution(x, weight, bias, *rest)
    specs = check("aten.convolution_backward.default", out, x, weight, [6], *rest, [True] * 3)
    assert {"R, S(1), S(1) -> S(1), S(1), R", "S(1), R, S(0) -> P, S(0), S(0)", "S(0), S(0), R -> S(0), P, P"} <= specs
    masked = check("aten.convolution_backward.default", out, x, weight, None, *rest, [True, True, False])
    assert "S(0), S(0), R -> S(0), P, R" in masked


def test_empty_shards_of_input_channels_would_lose_the_gradient_of_the_bias() -> None:
    x, weight = real(2, 3, 4), real(5, 3, 2)
    rest = ([1], [0], [1], False, [0], 1)
    out = aten.convolution(x, weight, None, *rest)
    specs = check_mesh("aten.convolution_backward.default", (out, x, weight, [5], *rest, [True] * 3), mesh=(4,))
    assert not any(str(s.outputs[2]) == "R" and str(s.inputs[1]) == "S(1)" for s in specs)


def test_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("aten.convolution.default", _args(), mesh=(2, 2))}
    assert {"S(0)R, RS(0), RS(0) -> S(0)S(1)", "S(0)S(1), RS(1), RP -> S(0)P"} <= specs
    check_mesh("aten.convolution.default", _args(groups=2), mesh=(2, 2))
