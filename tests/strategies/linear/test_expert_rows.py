"""Products of rows with the matrices of their experts: each equals a loop over rows, and its shards give the whole."""

from __future__ import annotations

import pytest
import torch

from tests.strategies.samples import real, whole
from tests.strategies.shards import check, check_mesh

IDS = whole(5, 6, 2)
ops = torch.ops.fxshard


def by_row(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The definition; rows of no expert are zero."""
    padded = torch.cat([weight, weight.new_zeros(1, *weight.shape[1:])])
    return torch.einsum("tjm,tjmn->tjn", x, padded[torch.where((ids >= 0) & (ids < len(weight)), ids, len(weight))])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_equal_their_definition(dtype: torch.dtype) -> None:
    """Forward and backward, with rows of no expert, in float64 and with torch's grouped kernel."""
    x, weight = real(6, 2, 16).to(dtype).requires_grad_(), real(3, 24, 16).to(dtype).requires_grad_()
    ids = IDS - 1
    out, want = ops.expert_linear(x, weight.transpose(1, 2), ids), by_row(x, weight.transpose(1, 2), ids)
    found, wanted = (torch.autograd.grad(y, (x, weight), real(6, 2, 24).to(dtype)) for y in (out, want))
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.1}
    for a, b in zip((out, *found), (want, *wanted), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_linear() -> None:
    """Tokens, experts, and both dims of the matrices can be sharded."""
    specs = check("fxshard.expert_linear.default", real(6, 2, 4), real(5, 4, 3), IDS)
    assert {"S(0), R, S(0) -> S(0)", "R, S(0), R -> P", "S(2), S(1), R -> P", "R, S(2), R -> S(2)", "P, R, R -> P"} <= specs


def test_outer() -> None:
    specs = check("fxshard.expert_outer.default", real(6, 2, 4), real(6, 2, 3), IDS, 5)
    assert {"S(0), S(0), S(0) -> P", "R, R, R -> S(0)", "S(2), R, R -> S(1)", "R, S(2), R -> S(2)", "R, P, R -> P"} <= specs


def test_two_axes() -> None:
    check_mesh("fxshard.expert_linear.default", (real(6, 2, 4), real(5, 4, 3), IDS), mesh=(2, 2))


@pytest.mark.parametrize("op", ["to_experts", "from_experts"])
def test_rows_that_stay(op: str) -> None:
    specs = check(f"fxshard.{op}.default", real(6, 2, 4), IDS, 5)
    end = ", R" if op == "to_experts" else ""
    assert {f"S(2), R -> S(2){end}", f"P, R -> P{end}"} <= specs
