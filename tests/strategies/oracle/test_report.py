"""What is printed about a rule: the verdict, and what it was not drawn from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from fxshard.strategies.oracle import Sample, check_op, report
from tests.strategies.samples import positive, real


def _said(op: str, *calls: tuple[Any, ...], budget: int = 60, **kwargs: Any) -> str:
    return report(check_op(op, [Sample(op, args, kwargs) for args in calls], budget))


def test_a_sample_that_is_too_small_is_said_to_be() -> None:
    assert_expected_inline(
        _said("aten.leaky_relu.default", (real(5, 6), 0.5), (real(5),)),
        """\
aten.leaky_relu.default: right and complete

samples judged                       2
... of these for what is wrong only  1
... again with other plain numbers   7
combinations tried                   7
not tried                            0
valid and offered                    4
valid and missing                    0
offered and wrong                    0

judged for what is wrong only, nothing is said on what is missing:
  (float64[5]): an operand has fewer than 6 elements""",
    )


def test_kernels_that_are_not_searched_are_said_to_be() -> None:
    said = _said("aten.avg_pool2d_backward.default", (real(2, 3, 4, 4), real(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], False, True, None))
    assert "right; what is missing was not searched" in said
    assert "its kernel reads out of bounds where shapes do not fit" in said


def test_positions_that_are_not_compared_are_counted() -> None:
    assert "not compared" not in _said("aten.mul.Tensor", (real(5, 6), real(5, 6)))
    x, y = real(5, 6), positive(5, 6)
    y[0, 0] = y[1, 1] = torch.inf
    said = _said("aten.mul.Tensor", (x, y))
    assert "not compared:\n  (float64[5, 6], float64[5, 6]): " in said and "positions of the result that are not finite" in said


@pytest.mark.filterwarnings("error")
def test_what_is_written_into_lies_as_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    """It has no placement of its own to try, and fits what a rank's shards give: torch warns where it does not."""
    verdict = check_op("aten.mm.out", [Sample("aten.mm.out", (real(5, 6), real(6, 4)), {"out": torch.zeros(5, 4, dtype=torch.float64)})])
    assert (verdict.wrong, verdict.missing) == ((), ())
    assert {str(o) for o in verdict.judged[0].valid} >= {"S(0), R, S(0) -> S(0)", "S(1), S(0), P -> P", "P, R, P -> P"}
    assert verdict.judged[0].possible == 8 * 8 - 1
    assert capfd.readouterr().err == ""
