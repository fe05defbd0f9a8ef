"""Scaled float8 matmuls, on small integers and powers of two, so that every order of additions is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard.strategies import op_strategy
from fxshard.strategies.linear.scaled import OF_BLOCKS
from tests.strategies.shards import Mesh, call_for, check, check_mesh

E4M3, F32 = torch.float8_e4m3fn, torch.float32


def eight(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).to(E4M3)


def powers(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape)))


A, B = eight(15, 32), eight(48, 32).t()
WHOLE = (powers(1)[0], powers(1)[0] * 2)
LINES = (powers(15, 1), powers(1, 48))
BIAS = torch.arange(48).to(torch.float32)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_scales_of_whole_matrices(bias: Any) -> None:
    specs = check("aten._scaled_mm.default", A, B, *WHOLE, bias, None, F32)
    more = ", R" if bias is not None else ""
    assert f"S(0), R, R, R{more} -> S(0)" in specs
    assert f"R, S(1), R, R{more and ', S(0)'} -> S(1)" in specs  # 48 columns are three blocks, one for each of three ranks
    assert f"S(1), S(0), R, R{more and ', P'} -> P" in specs


def test_scales_of_rows_and_columns() -> None:
    specs = check("aten._scaled_mm.default", A, B, *LINES, None, None, F32)
    assert {"S(0), R, S(0), R -> S(0)", "R, S(1), R, S(1) -> S(1)", "S(1), S(0), R, R -> P"} <= specs


@pytest.mark.parametrize(("recipe", "scales"), [(0, tuple(s.reshape(1) for s in WHOLE)), (1, LINES)], ids=["whole", "lines"])
def test_recipes(recipe: int, scales: Any) -> None:
    a, b = scales
    args = (A, B, [a], [recipe], [0], [b], [recipe], [0], BIAS, F32)
    specs = check("aten._scaled_mm_v2.default", *args)
    row, column = ("S(0)", "S(1)") if recipe else ("R", "R")
    assert {f"S(0), R, {row}, R, R -> S(0)", f"R, S(1), R, {column}, S(0) -> S(1)", "S(1), S(0), R, R, P -> P"} <= specs


def test_two_axes() -> None:
    args = (eight(16, 32), eight(32, 32).t(), *WHOLE, None, None, F32)
    specs = {str(s) for s in check_mesh("aten._scaled_mm.default", args, mesh=(2, 2))}
    assert {"S(0)S(1), RS(0), RR, RR -> S(0)P", "S(0)R, RS(1), RR, RR -> S(0)S(1)"} <= specs


def test_shards_must_be_multiples_of_sixteen() -> None:
    """Two ranks would split 48 columns in the middle of a block."""
    specs = {str(s) for s in check_mesh("aten._scaled_mm.default", (A, B, *WHOLE, None, None, F32), mesh=(2,))}
    assert "S(0), R, R, R -> S(0)" in specs
    assert not any(s.startswith("R, S(1)") for s in specs)


def test_a_float8_result_is_never_pending() -> None:
    whole = torch.empty(15, 48, dtype=E4M3)
    call, _ = call_for("aten._scaled_mm.default", (A, B, *WHOLE), {}, (whole,))
    assert not any("P" in str(s) for s in op_strategy(call, Mesh({"a": 2})).specs)


def test_blockwise_scales_are_replicated_with_a_reason() -> None:
    a, b = torch.empty(256, 256, dtype=E4M3), torch.empty(256, 256, dtype=E4M3)
    args = (a, b, [torch.empty(256, 2)], [4], [0], [torch.empty(256, 2)], [4], [0], None, torch.bfloat16)
    call, _ = call_for("aten._scaled_mm_v2.default", args, {}, (torch.empty(256, 256, dtype=torch.bfloat16),))
    strategy = op_strategy(call, Mesh({"a": 2}))
    assert [str(s) for s in strategy.specs] == ["R, R, R, R -> R"]
    assert strategy.reason == OF_BLOCKS
