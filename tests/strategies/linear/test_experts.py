"""Grouped matmuls: each group of rows is multiplied by its own matrix; some groups are empty."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers torch.ops.transformers)

from tests.strategies.samples import real
from tests.strategies.shards import check, check_mesh

OFFS = torch.tensor([2, 2, 7], dtype=torch.int32)


def single(*shape: int) -> torch.Tensor:
    return real(*shape).float()


def test_forward() -> None:
    """Columns of the weights, the contracted dim, and groups can be sharded; rows cannot."""
    specs = check("transformers.grouped_mm_fallback.default", real(7, 4), real(3, 4, 5), OFFS)
    assert {"R, S(2), R -> S(1)", "S(1), S(1), R -> P", "R, S(0), R -> P", "P, R, R -> P", "R, P, R -> P"} <= specs
    assert not any(s.startswith("S(0)") for s in specs)


def test_backward() -> None:
    specs = check("transformers.grouped_mm_fallback_backward.default", real(7, 4), real(3, 4, 5), OFFS, real(7, 5))
    assert {"R, S(2), R, S(1) -> P, S(2)", "S(1), S(1), R, R -> S(1), S(1)", "R, S(0), R, R -> P, S(0)"} <= specs
    assert "R, R, R, P -> P, P" in specs


@pytest.mark.parametrize("op", ["transformers.grouped_mm_fallback.default", "aten._grouped_mm.default"])
def test_rows_of_no_group_are_zero(op: str) -> None:
    """transformers' kernel zeroes the rows after the last group. torch's leaves them undefined, so there are none in its case."""
    offs = torch.tensor([1, 4, 6, 6], dtype=torch.int32)
    rows = 6 if "aten" in op else 8
    check_mesh(op, (single(rows, 8), single(4, 8, 16), offs), mesh=(2, 2))


def test_torch_kernel_with_grouped_rows() -> None:
    specs = check("aten._grouped_mm.default", single(7, 8), single(3, 8, 16), OFFS)
    assert {"R, S(2), R -> S(1)", "S(1), S(1), R -> P", "R, S(0), R -> P", "P, R, R -> P", "R, P, R -> P"} <= specs
    assert not any(s.startswith("S(0)") for s in specs)


@pytest.mark.parametrize("turned", [False, True])
def test_torch_kernel_with_a_grouped_contraction(turned: bool) -> None:
    """As in the gradient of the weights: the contracted dim is grouped, and each group gives one matrix."""
    offs = torch.tensor([2, 2, 8], dtype=torch.int32)
    a = single(8, 16).t() if turned else single(16, 8)
    specs = check("aten._grouped_mm.default", a, single(8, 16), offs)
    assert {"S(0), R, R -> S(1)", "R, S(1), R -> S(2)", "R, R, R -> S(0)", "P, R, R -> P"} <= specs
    assert not any("-> P" in s and not s.startswith(("P", "R, P")) for s in specs)


def test_torch_kernel_with_grouped_columns_and_with_a_plain_batch() -> None:
    columns = check("aten._grouped_mm.default", single(3, 16, 8), single(8, 8), torch.tensor([2, 2, 8], dtype=torch.int32))
    assert {"S(1), R, R -> S(0)", "S(2), S(0), R -> P"} <= columns
    assert "S(0), S(0) -> S(0)" in check("aten._grouped_mm.default", single(3, 4, 8), single(3, 8, 16))


def test_a_dim_that_is_not_aligned_stays_whole() -> None:
    """12 columns of 4 bytes are three blocks of 16 bytes: two ranks would split one."""
    specs = check_mesh("aten._grouped_mm.default", (single(7, 8), single(3, 8, 12), OFFS), mesh=(2,))
    assert "S(1), S(1), R -> P" in {str(s) for s in specs}
    assert "R, S(2), R -> S(1)" not in {str(s) for s in specs}
