"""The parts of softmax and cross-entropy: each is right on a shard of the classes, also on uneven and empty ones."""

from __future__ import annotations

import pytest
import torch

from tests.strategies.samples import positive, real, whole
from tests.strategies.shards import check, check_mesh

X = real(3, 5, 2)
TARGET = whole(5, 3, 2)
M = X.amax(1)
S = (X - M.unsqueeze(1)).exp().sum(1)


def test_a_sum_of_exponentials_is_left_pending() -> None:
    specs = check("fxshard.sum_exp.default", X, M, 1)
    assert {"S(1), R -> P", "S(0), S(0) -> S(0)", "S(2), S(1) -> S(1)"} <= specs


@pytest.mark.parametrize("kind", ["exp", "log", "safe"])
def test_softmax_is_applied_to_a_part(kind: str) -> None:
    specs = check("fxshard.softmax.default", X, M, S, 1, kind, torch.float64)
    assert {"S(1), R, R -> S(1)", "S(2), S(1), S(1) -> S(2)"} <= specs


@pytest.mark.parametrize("kind", ["exp", "log"])
def test_softmax_backward(kind: str) -> None:
    grad = real(3, 5, 2) * 2
    specs = check("fxshard.sum_product.default", grad, X, 1)
    assert {"S(1), S(1) -> P", "S(0), S(0) -> S(0)", "P, R -> P", "R, P -> P"} <= specs
    specs = check("fxshard.softmax_backward.default", grad, X, M, 1, kind, torch.float64)
    assert {"S(1), S(1), R -> S(1)", "P, R, P -> P"} <= specs


@pytest.mark.parametrize("maximum", [M, None])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_the_score_of_the_target(maximum: torch.Tensor | None, ignored: int) -> None:
    target = TARGET.clone()
    target[0, 0] = ignored
    specs = check("fxshard.target_score.default", X, maximum, target, 1, ignored, 5)
    assert ("S(1), R -> P" if maximum is None else "S(1), R, R -> P") in specs


def test_classes_of_other_ranks_do_not_leak() -> None:
    x = real(3, 5)
    x[:, 0] = torch.inf
    check("fxshard.target_score.default", x, None, torch.tensor([4, 3, 1]), 1, -100, 5)


@pytest.mark.parametrize("first", [None, 3])
@pytest.mark.parametrize("bad", [-1, 9])
def test_a_target_out_of_range_is_refused(first: int | None, bad: int) -> None:
    """There are 9 classes. Every shard refuses the target, even if it has other classes."""
    classes = 9 if first is None else 3
    args = (real(2, classes), None, torch.tensor([bad, 2]), 1, -100, 9)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.ops.fxshard.target_score(*args, *([] if first is None else [torch.tensor(first)]))


def test_one_sample_without_a_batch() -> None:
    x, target = real(5), torch.tensor(3)
    assert check("fxshard.target_score.default", x, x.max(), target, 0, -100, 5) == {"R, R, R -> R", "S(0), R, R -> P"}


@pytest.mark.parametrize("weight", [positive(5), None])
def test_smoothing_needs_the_sum_of_all_scores(weight: torch.Tensor | None) -> None:
    specs = check("fxshard.score_sum.default", X, M, weight, 1)
    assert ("S(1), R -> P" if weight is None else "S(1), R, S(0) -> P") in specs


@pytest.mark.parametrize("weight", [positive(5), None])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_each_sample(weight: torch.Tensor | None, smoothing: float) -> None:
    """The loss is not linear in its inputs: a pending one must be reduced first, one number per sample."""
    specs = check("fxshard.cross_entropy.default", M, TARGET, weight, S, S if smoothing else None, 1, smoothing, 5)
    assert not any("P" in s for s in specs)
    assert any(s.endswith("S(1), S(1)") for s in specs)


@pytest.mark.parametrize("weight", [positive(5), None])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_gradient_shards_by_classes(weight: torch.Tensor | None, smoothing: float) -> None:
    slope, weight = (S * 2, weight) if smoothing else (None, None)
    specs = check("fxshard.cross_entropy_backward.default", M, S * 3, slope, X, M, S, TARGET, weight, 1, 1, smoothing, 5)
    before, after = "R, " * (2 + (slope is not None)), ", S(0)" if weight is not None else ""
    assert f"{before}S(1), R, R, R{after} -> S(1)" in specs
    assert f"P, {before[3:]}R, R, R, R{after and ', R'} -> P" in specs


def test_values_at_their_targets() -> None:
    specs = check("fxshard.spread_target.default", M, TARGET, 1, 5, torch.float64)
    assert {"R, R -> S(1)", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(2)", "P, R -> P"} <= specs


def test_pieces_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("fxshard.target_score.default", (X, M, TARGET, 1, -100, 5))}
    assert {"S(0)S(1), S(0)R, S(0)R -> S(0)P", "S(1)S(1), RR, RR -> PP"} <= specs
    specs = {str(s) for s in check_mesh("fxshard.cross_entropy_backward.default", (M, S, None, X, M, S, TARGET, None, 1, -100, 0.0, 5))}
    assert "RR, RR, S(1)S(1), RR, RR, RR -> S(1)S(1)" in specs
