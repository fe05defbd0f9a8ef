"""The oracle finds wrong and missing options of a rule, and is not misled by coincidences of a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard.strategies.engine.factors import replicate_all
from fxshard.strategies.engine.notation import einop_rule, pointwise_rule, rule
from fxshard.strategies.engine.registry import temporary_rule
from fxshard.strategies.oracle import Sample, check_op, judge
from tests.strategies.samples import positive, real, whole, yes_no

MM = Sample("aten.mm.default", (real(5, 6), real(6, 4)))


def _options(findings: Any) -> set[str]:
    return {str(f.option) for f in findings}


def test_a_right_rule_is_right_and_complete() -> None:
    verdict = check_op("aten.mm.default", [MM])
    assert (verdict.wrong, verdict.missing) == ((), ())
    assert verdict.valid == 7  # m, n, k, and sums and averages in each operand
    assert verdict.judged[0].searched == verdict.judged[0].possible == 8 * 8 - 1


@pytest.mark.parametrize(
    ("pattern", "bad"),
    [
        ("m k, k n -> m n", None),
        ("m k, j n -> m n", "S(1), R -> P"),
        ("m k!, k! n -> m n", None),
    ],
)
def test_a_wrong_factor_is_found(pattern: str, bad: str | None) -> None:
    with temporary_rule("aten.mm.default", rule(pattern)):
        verdict = check_op("aten.mm.default", [MM])
    assert (bad in _options(verdict.wrong)) if bad else not verdict.wrong


def test_an_option_that_a_rule_omits_is_missing() -> None:
    with temporary_rule("aten.mm.default", rule("m _, _ n -> m n")):
        assert "S(1), S(0) -> P" in _options(check_op("aten.mm.default", [MM]).missing)
    with temporary_rule("aten.mm.default", replicate_all):
        assert len(check_op("aten.mm.default", [MM]).missing) == 7


def test_a_wrong_reduction_is_found() -> None:
    sample = Sample("aten.amax.default", (real(5, 6), [1]))
    with temporary_rule("aten.amax.default", rule("a b -> a")):
        assert "S(1) -> P" in _options(check_op("aten.amax.default", [sample]).wrong)


def test_a_pending_sum_does_not_pass_a_nonlinear_operator() -> None:
    with temporary_rule("aten.exp.default", pointwise_rule((0,))):
        assert "P -> P" in _options(check_op("aten.exp.default", [Sample("aten.exp.default", (real(5, 6),))]).wrong)
    with temporary_rule("aten.add.Tensor", einop_rule("a b, a b -> a b")):
        assert "P, R -> P" in _options(check_op("aten.add.Tensor", [Sample("aten.add.Tensor", (real(5, 6), real(5, 6)))]).wrong)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("mul.Tensor", (torch.ones(5, 6, dtype=torch.int64), torch.zeros(5, 6, dtype=torch.int64))),
        ("sum.default", (torch.zeros(8, dtype=torch.bool),)),
        ("relu.default", (torch.tensor(2.0, dtype=torch.float64),)),
        ("add.Tensor", (real(0, 3), real(0, 3))),
        ("sort.default", (torch.ones(6, 6, dtype=torch.bool),)),
    ],
)
def test_inconclusive_samples_give_no_findings(op: str, args: Any) -> None:
    with temporary_rule(f"aten.{op}", replicate_all):
        judged = judge(Sample(f"aten.{op}", args))
    assert (judged.valid, judged.missing) == ((), ())


@pytest.mark.parametrize(
    ("op", "args", "accident"),
    [
        ("clamp.default", (real(5, 6).clamp(-0.5, 0.5), -1.0, 1.0), "P -> P"),  # this sample has no number to clamp
        ("relu.default", (positive(5, 6),), "P -> P"),  # and this one no negative number
        ("cumsum.default", (real(5, 6), 1), "S(1) -> S(1)"),
        ("where.self", (yes_no(5, 6), real(5, 6), real(5, 6)), "R, P, R -> P"),
        ("index_select.default", (real(6, 5), 0, whole(6, 7)), "S(0), R -> P"),
        ("any.dim", (1 + whole(3, 5, 6), 1), "P(max) -> P(min)"),  # this one has no row without true elements
        ("any.dim", (1 + whole(3, 5, 6), 1), "P(min) -> P(min)"),
        ("logical_or.default", (real(5, 6), real(5, 6)), "P(max), R -> P(min)"),  # this one has no zero
        ("logical_not.default", (real(5, 6),), "P(max) -> P(max)"),
        (
            "le.Tensor",
            (positive(5, 6), 1e-4 * positive(6, 5).mT),
            "R, P -> P(max)",
        ),  # and this one none below the other's parts
    ],
)
def test_coincidences_are_not_findings(op: str, args: Any, accident: str) -> None:
    with temporary_rule(f"aten.{op}", replicate_all):
        found = judge(Sample(f"aten.{op}", args)).missing
    assert found
    assert accident not in _options(found)


def test_constant_tensors_are_tried_with_other_numbers() -> None:
    x, zeros = real(5, 6), torch.zeros(5, 6, dtype=torch.float64)
    with temporary_rule("aten.mul.Tensor", replicate_all):
        found = _options(judge(Sample("aten.mul.Tensor", (x, zeros))).missing)
    assert {"P, R -> P", "S(0), S(0) -> S(0)"} <= found
    assert not {"P, P -> P", "S(0), R -> P", "P(max), R -> R"} & found


def test_random_and_undefined_operators_are_not_judged() -> None:
    assert "random" in judge(Sample("aten.bernoulli.default", (real(40, 5).sigmoid(),))).skipped
    assert "undefined" in judge(Sample("aten.empty_like.default", (real(5, 6),))).skipped
    assert "fails" in judge(Sample("aten.mm.default", (real(5, 6), real(5, 6)))).skipped


def test_a_random_operator_is_recognised_even_if_its_numbers_repeat() -> None:
    certain = torch.full((), 0.999999, dtype=torch.float64)
    assert "random" in judge(Sample("aten.bernoulli.default", (certain,))).skipped


def test_a_small_budget_goes_to_the_options_of_the_rule_first() -> None:
    judged = judge(MM, budget=20)
    assert (judged.searched, judged.possible) == (20, 63)
    assert len(judged.valid) == 7


def test_a_replicated_operand_with_a_pending_maximum_is_not_missing() -> None:
    sample = Sample("aten.maximum.default", (real(5, 6), real(5, 6)))
    judged = judge(sample)
    assert not judged.missing
    assert judged.valid
