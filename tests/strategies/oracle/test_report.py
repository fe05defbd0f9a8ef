"""The report on a rule: the verdict, and which samples and combinations it does not cover."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from fxshard.strategies.engine.notation import rule
from fxshard.strategies.engine.registry import temporary_rule
from fxshard.strategies.oracle import Sample, check_op, find_rule, report, report_rule
from tests.strategies.samples import positive, real

GATE = {
    "gate(Tensor x, Tensor scale) -> Tensor": lambda x, scale: torch.sigmoid(x) * scale,
    "gate_backward(Tensor g, Tensor x, Tensor scale) -> (Tensor, Tensor)": lambda g, x, scale: (
        g * scale * torch.sigmoid(x) * (1 - torch.sigmoid(x)),
        (g * torch.sigmoid(x)).sum((0, 1)),
    ),
}


def _said(op: str, *calls: tuple[Any, ...], budget: int = 60, **kwargs: Any) -> str:
    return report(check_op(op, [Sample(op, args, kwargs) for args in calls], budget))


def test_the_report_names_samples_that_are_too_small() -> None:
    assert_expected_inline(
        _said("aten.leaky_relu.default", (real(5, 6), 0.5), (real(5),)),
        """\
aten.leaky_relu.default: right and complete

samples judged                   2
... for wrong combinations only  1
... again with other numbers     7
offered and run                  7
combinations tried               7
not tried                        0
valid and offered                4
valid and missing                0
offered and wrong                0

judged for wrong combinations only, not for missing ones:
  (float64[5]): an operand has fewer than 6 elements""",
    )


def test_a_rule_is_complete_only_if_all_combinations_were_tried() -> None:
    sample = (real(3, 5, 7), real(3, 7, 4))
    assert "aten.bmm.default: right and complete" in (said := _said("aten.bmm.default", sample, budget=200)) and "--budget" not in said
    said = _said("aten.bmm.default", sample, budget=20)
    assert "aten.bmm.default: right; 60 combinations were not tried (--budget)" in said and "combinations beyond --budget" in said


def test_the_report_says_if_only_replicated_is_offered() -> None:
    with temporary_rule("aten.sin.default", rule("_ -> _")):
        assert "nothing but replicated is offered for these samples" in _said("aten.sin.default", (real(5),))


def test_missing_options_that_the_notation_cannot_express_are_named() -> None:
    """A pending maximum passes an increasing function, which the text notation cannot express."""
    sample = Sample("aten.relu.default", (real(5, 6),))
    with temporary_rule("aten.relu.default", rule("a b -> a b")):
        said = report(check_op("aten.relu.default", [sample]))
    assert "right, but not complete" in said and "2 of the missing combinations: pending in a maximum" in said
    with temporary_rule("aten.relu.default", rule("a _ -> a _", ops=("max", "min"), linear=[[0]])):
        assert "of the missing combinations" not in report(check_op("aten.relu.default", [sample]))


def test_the_report_says_if_a_kernel_was_not_searched() -> None:
    said = _said("aten.avg_pool2d_backward.default", (real(2, 3, 4, 4), real(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], False, True, None))
    assert "right; missing combinations were not searched for" in said and "nothing but replicated" not in said
    assert re.search(r"offered and run +[1-9]", said)
    assert "its kernel reads out of bounds where shapes do not fit" in said


def test_positions_that_are_not_compared_are_counted() -> None:
    assert "not compared" not in _said("aten.mul.Tensor", (real(5, 6), real(5, 6)))
    x, y = real(5, 6), positive(5, 6)
    y[0, 0] = y[1, 1] = torch.inf
    said = _said("aten.mul.Tensor", (x, y))
    assert "not compared:\n  (float64[5, 6], float64[5, 6]): " in said and "positions of the result that are not finite" in said


@pytest.mark.filterwarnings("error")
def test_an_out_tensor_has_the_layout_of_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    """Its placement is not tried separately, and its shard has the shape of the result: otherwise torch would warn."""
    verdict = check_op("aten.mm.out", [Sample("aten.mm.out", (real(5, 6), real(6, 4)), {"out": torch.zeros(5, 4, dtype=torch.float64)})])
    assert (verdict.wrong, verdict.missing) == ((), ())
    assert {str(o) for o in verdict.judged[0].valid} >= {"S(0), R, S(0) -> S(0)", "S(1), S(0), P -> P", "P, R, P -> P"}
    assert verdict.judged[0].possible == 8 * 8 - 1
    assert capfd.readouterr().err == ""


def test_the_report_on_a_found_rule_states_its_limits() -> None:
    """A search cut by the budget, a list argument whose length may vary, no rule worth registering."""
    mm, cat = Sample("aten.mm.default", (real(5, 6), real(6, 4))), Sample("aten.cat.default", ([real(5, 3), real(5, 4)], 1))
    assert "the search was cut: 43 combinations" in report_rule(find_rule("aten.mm.default", [mm], 20))
    whole = report_rule(find_rule("aten.mm.default", [mm]))
    assert "cut" not in whole and "at=" not in whole
    assert "tensors may hold more or fewer; for those write at=" in report_rule(find_rule("aten.cat.default", [cat]))
    nothing = find_rule("aten.logcumsumexp.default", [Sample("aten.logcumsumexp.default", (real(7), 0))])
    assert "none that is worth registering" in report_rule(nothing) and "register_rule" not in report_rule(nothing)


def test_rules_in_the_documentation_miss_only_what_the_notation_cannot_express() -> None:
    library = torch.library.Library("fxshard_page", "FRAGMENT")
    for schema, function in GATE.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    page = (Path(__file__).parents[3] / "docs" / "adding-an-operator.md").read_text()
    for name, shapes in {"gate": ((3, 4, 6), (6,)), "gate_backward": ((3, 4, 6), (3, 4, 6), (6,))}.items():
        lines = [c for c in re.findall(rf'^fxshard.register_rule\("mylib::{name}", (.*)\)$', page, re.MULTILINE)]
        assert len(lines) == 1
        op = f"fxshard_page.{name}.default"
        made = ast.parse(f"rule({lines[0]})", mode="eval").body
        assert isinstance(made, ast.Call)
        properties = {str(k.arg): ast.literal_eval(k.value) for k in made.keywords}
        with temporary_rule(op, rule(ast.literal_eval(made.args[0]), **properties)):
            verdict = check_op(op, [Sample(op, tuple(real(*shape) for shape in shapes))])
        assert not verdict.wrong and f"\n{len(verdict.missing)} of the missing combinations: pending in" in report(verdict)
