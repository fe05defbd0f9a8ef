"""Losses: means over uneven shards of the batch, weights, ignored targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategies.samples import positive, real, whole
from tests.strategies.shards import check

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_nll_loss(reduction: int, weighted: bool, ignored: int) -> None:
    x, target, weight = real(5, 4).log_softmax(1), whole(4, 5), positive(4) if weighted else None
    specs = check("aten.nll_loss_forward.default", x, target, weight, reduction, ignored)
    offered = any(s.startswith("S(0), S(0)") for s in specs)
    assert offered == (reduction != MEAN)
    assert not any(s.startswith("S(1)") for s in specs)
    loss, total = aten.nll_loss_forward(x, target, weight, reduction, ignored)
    specs = check("aten.nll_loss_backward.default", loss * 2, x, target, weight, reduction, ignored, total)
    assert any(s.endswith("-> S(0)") for s in specs) == (reduction != MEAN)


def test_the_batch_leaves_pending_sums() -> None:
    specs = check("aten.nll_loss_forward.default", real(5, 4), whole(4, 5), positive(4), SUM, 2)
    assert "S(0), S(0), R -> P, P" in specs


def test_nll_loss_of_one_sample() -> None:
    assert check("aten.nll_loss_forward.default", real(4), whole(4), None, SUM, -100) == {"R, R -> R, R"}


def test_nll_loss2d() -> None:
    x, target = real(3, 4, 2, 5), whole(4, 3, 2, 5)
    assert "S(3), S(2) -> P, P" in check("aten.nll_loss2d_forward.default", x, target, None, SUM, -100)


@pytest.mark.parametrize(("op", "extra"), [("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,)), ("soft_margin_loss", ())])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_elementwise_losses(op: str, extra: tuple[Any, ...], reduction: int) -> None:
    x, y = real(5, 3), positive(5, 3)
    specs = check(f"aten.{op}.default", x, y, reduction, *extra)
    assert ("S(0), S(0) -> S(0)" if reduction == NONE else "S(0), S(0) -> P") in specs
    grad = getattr(aten, op)(x, y, reduction, *extra)
    specs = check(f"aten.{op}_backward.default", grad, x, y, reduction, *extra)
    assert any(s.endswith("S(0), S(0) -> S(0)") for s in specs)


def test_a_loss_with_its_defaults_is_a_mean() -> None:
    assert "S(0), S(0) -> P" in check("aten.mse_loss.default", real(5, 3), positive(5, 3))


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
def test_binary_cross_entropy(reduction: int) -> None:
    x, y, w = real(5, 3).sigmoid(), real(5, 3).abs().clamp(max=1), positive(3)
    specs = check("aten.binary_cross_entropy.default", x, y, w, reduction)
    assert any(s.startswith("S(0), S(0), R") for s in specs)
    grad = aten.binary_cross_entropy(x, y, w, reduction)
    check("aten.binary_cross_entropy_backward.default", grad, x, y, w.expand(5, 3).contiguous(), reduction)
    check("aten.binary_cross_entropy_with_logits.default", real(5, 3), y, None, w, reduction)
