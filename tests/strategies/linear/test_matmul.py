"""Contractions: the equation is the rule; a sharded contracted dim leaves a pending sum."""

import math

import pytest
import torch

from tests.strategies.samples import real
from tests.strategies.shards import check, check_mesh


def test_mm_offers_batch_columns_and_contraction() -> None:
    assert check("aten.mm.default", real(5, 4), real(4, 6)) == {
        "R, R -> R",
        "S(0), R -> S(0)",
        "R, S(1) -> S(1)",
        "S(1), S(0) -> P",
        "P, R -> P",
        "P(avg), R -> P(avg)",
        "R, P -> P",
        "R, P(avg) -> P(avg)",
    }


@pytest.mark.parametrize(
    ("equation", "a", "b"),
    [
        ("abk,nk->abn", (3, 5, 4), (6, 4)),
        ("bmk,bkn->bmn", (2, 3, 4), (2, 4, 5)),
        ("abn,abk->nk", (2, 3, 5), (2, 3, 4)),
        ("k,nk->n", (4,), (6, 4)),
        ("k,k->", (5,), (5,)),
        ("a,b->ab", (3,), (4,)),
        ("ab,ba->a", (3, 5), (5, 3)),
        ("bmk,bkn->bmn", (1, 3, 4), (1, 4, 5)),
    ],
)
def test_einsum(equation: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    specs = check("fxshard.einsum.default", real(*a), real(*b), equation)
    assert any("P, R -> P" in s for s in specs)


def test_bmm_mv_dot() -> None:
    assert "S(0), S(0) -> S(0)" in check("aten.bmm.default", real(5, 2, 3), real(5, 3, 4))
    assert "S(1), S(0) -> P" in check("aten.mv.default", real(5, 3), real(3))
    assert "S(0), S(0) -> P" in check("aten.dot.default", real(5), real(5))


@pytest.mark.parametrize("bias", [(6,), (5, 6), (1, 6), (5, 1)])
def test_addmm_must_not_add_its_bias_on_every_rank(bias: tuple[int, ...]) -> None:
    specs = check("aten.addmm.default", real(*bias), real(5, 4), real(4, 6), beta=0.5, alpha=2)
    assert "P, S(1), S(0) -> P" in specs
    assert "R, S(1), S(0) -> P" not in specs


def test_a_pending_bias_refuses_empty_shards() -> None:
    """A rank with an empty shard of k does not run the operator, so its part of the bias would be lost."""
    specs = check_mesh("aten.addmm.default", (real(6), real(5, 3), real(3, 6)), mesh=(4,))
    assert "P, S(1), S(0) -> P" not in {str(s) for s in specs}


def test_linear_with_and_without_bias() -> None:
    assert "S(2), S(1), P -> P" in check("aten.linear.default", real(2, 3, 4), real(6, 4), real(6))
    assert "S(2), S(1) -> P" in check("aten.linear.default", real(2, 3, 4), real(6, 4))


def test_baddbmm_and_addmv() -> None:
    assert "P, S(2), S(1) -> P" in check("aten.baddbmm.default", real(2, 3, 5), real(2, 3, 4), real(2, 4, 5))
    assert "P, S(1), S(0) -> P" in check("aten.addmv.default", real(5), real(5, 4), real(4))


def test_trilinear() -> None:
    args = (real(5, 3), real(2, 3, 4), real(5, 4), [1, 3], [0], [1, 2], [2, 3])
    assert {"S(0), R, S(0) -> S(0)", "S(1), S(1), R -> P"} <= check("aten._trilinear.default", *args)


def test_distances() -> None:
    x, y = real(5, 3), real(4, 3)
    assert {"S(0), R -> S(0)", "R, S(0) -> S(1)"} <= check("aten._cdist_forward.default", x, y, 2.0, None)
    d = torch.ops.aten._cdist_forward(x, y, 2.0, None)
    assert {"S(1), R, S(0), S(1) -> P", "R, S(1), S(1), R -> S(1)"} <= check("aten._cdist_backward.default", real(5, 4), x, y, 2.0, d)


@pytest.mark.parametrize(
    ("a", "b", "batch", "points"),
    [
        ((5, 3), (2, 4, 3), "S(0), R, S(0), S(0) -> S(0)", "S(1), S(0), R, S(1) -> S(1)"),
        ((2, 5, 3), (4, 3), "S(0), S(0), R, S(0) -> S(0)", "S(1), S(1), R, S(1) -> S(1)"),
    ],
)
def test_gradients_of_distances_between_a_batch_and_one_set(a: tuple[int, ...], b: tuple[int, ...], batch: str, points: str) -> None:
    """Either operand may have no batch; the gradient has it."""
    x, y = real(*a), real(*b)
    far = torch.ops.aten._cdist_forward(x, y, 2.0, None)
    assert {batch, points} <= check("aten._cdist_backward.default", real(2, 5, 4), x, y, 2.0, far)


@pytest.mark.parametrize(("p", "pending"), [(0.0, "P"), (1.0, "P"), (math.inf, "P(max)"), (2.0, None), (1.5, None)])
def test_distances_over_sharded_columns(p: float, pending: str | None) -> None:
    """The root of a sum cannot be pending. Gradients need only the distances and their own columns."""
    x, y = real(5, 3), real(4, 3)
    cut = {f"S(1), S(1) -> {pending}"} if pending else set()
    assert {s for s in check("aten._cdist_forward.default", x, y, p, None) if s.startswith("S(1), S(1)")} == cut
    assert {s for s in check("aten._pdist_forward.default", x, p) if "S(" in s} == ({f"S(1) -> {pending}"} if pending else set())
    pairs, far = torch.ops.aten._pdist_forward(x, p), torch.ops.aten._cdist_forward(x, y, p, None)
    assert "R, S(1), R -> S(1)" in check("aten._pdist_backward.default", real(10), x, p, pairs)
    assert "R, S(1), S(1), R -> S(1)" in check("aten._cdist_backward.default", real(5, 4), x, y, p, far)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (2, 2, 2)])
def test_einsum_on_a_mesh(mesh: tuple[int, ...]) -> None:
    specs = check_mesh("fxshard.einsum.default", (real(5, 4), real(6, 4), "mk,nk->mn"), mesh=mesh)
    assert len(specs) == len(set(map(str, specs)))


def test_every_batch_dim_of_a_linear_layer_shards() -> None:
    """The input is (batch, length, k); the result has all its dims but the last."""
    specs = check("aten.linear.default", real(4, 3, 6), real(5, 6))
    assert {"S(0), R -> S(0)", "S(1), R -> S(1)", "R, S(0) -> S(2)", "S(2), S(1) -> P"} <= specs
