"""fxshard.register_rule: what it accepts, what it refuses and how, and what a registration changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxshard
from fxshard.errors import OptionError, RuleError
from fxshard.strategies import Call, Operand, TensorMeta, factors, op_strategy, pointwise_rule
from tests.custom_operators import GATE, gate, register_gate

pytestmark = pytest.mark.usefixtures("own_rules")


def specs(op: str, operands: list[tuple[int, ...]], outputs: list[tuple[int, ...]], *rest: Any) -> set[str]:
    metas = [tuple(TensorMeta(s, torch.float32) for s in shapes) for shapes in (operands, outputs)]
    call = Call(op, (*map(Operand, range(len(operands))), *rest), (), *metas)
    return {str(s) for s in op_strategy(call, fxshard.Mesh({"a": 2})).specs}


def gate_specs() -> set[str]:
    return specs("tests.gate.default", [(4, 6, 8), (8,)], [(4, 6, 8)])


SHARDED = {"R, R -> R", "S(0), R -> S(0)", "S(1), R -> S(1)", "S(2), S(0) -> S(2)"}


@pytest.mark.parametrize(
    "op", ["tests::gate", "tests::gate.default", "tests.gate.default", gate, torch.ops.tests.gate, torch.ops.tests.gate.default], ids=repr
)
def test_names_and_objects_are_the_same_operator(op: Any) -> None:
    assert gate_specs() == {"R, R -> R"}  # fills the cache, which a registration must clear
    fxshard.register_rule(op, GATE[1])
    assert gate_specs() == SHARDED


def test_an_overload() -> None:
    fxshard.register_rule("aten::add.Tensor", "_ b, _ b -> _ b", override=True)
    assert specs("aten.add.Tensor", [(4, 6), (4, 6)], [(4, 6)]) == {"R, R -> R", "S(1), S(1) -> S(1)"}


@pytest.mark.parametrize(
    ("properties", "more"),
    [
        ({"linear": [[1]]}, {"R, P -> P", "R, P(avg) -> P(avg)"}),
        ({"linear": [[1]], "ops": ("sum",)}, {"R, P -> P"}),
    ],
)
def test_properties_are_those_of_rule(properties: dict[str, Any], more: set[str]) -> None:
    fxshard.register_rule(*GATE, **properties)
    assert gate_specs() - SHARDED == more


def test_reduce() -> None:
    fxshard.register_rule("aten::amax", "b h -> b", reduce={"h": "max"}, override=True)
    assert specs("aten.amax.default", [(4, 6)], [(4,)], (1,)) == {"R -> R", "S(0) -> S(0)", "S(1) -> P(max)"}


def test_optional_tensors_are_named_by_position() -> None:
    fxshard.register_rule("aten::layer_norm", "b h!, h!, h! -> b h!", at=(0, 2, 3), override=True)
    metas = TensorMeta((4, 6), torch.float32), TensorMeta((6,), torch.float32)
    call = Call("aten.layer_norm.default", (Operand(0), (6,), Operand(1), None, 1e-5, False), (), metas, metas[:1])
    assert {str(s) for s in op_strategy(call, fxshard.Mesh({"a": 2})).specs} == {"R, R -> R", "S(0), R -> S(0)"}


@pytest.mark.parametrize("rule", [lambda call: factors([["b", "", "h"], ["h"]], [["b", "", "h"]]), pointwise_rule()])
def test_a_function_from_call_to_factors(rule: Callable[[Call], Any]) -> None:
    fxshard.register_rule("tests::gate", rule)
    assert {"S(0), R -> S(0)", "S(2), S(0) -> S(2)"} <= gate_specs()


REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (("tests::gaet", GATE[1]), {}, OptionError, r"no operator 'tests::gaet'; did you mean 'tests::gate'\?"),
    (("gate", GATE[1]), {}, OptionError, "no operator 'gate'"),
    (("aten::add", "b, b -> b"), {}, OptionError, r"no default overload; it has .*aten::add\.Tensor"),
    ((len, "b -> b"), {}, OptionError, "is not an operator of torch"),
    (("tests::gate", "b s h -> b s h"), {}, RuleError, r"tests::gate\(Tensor x.*it has 1 operands, the operator takes 2"),
    (("tests::gate", "b s h, h -> b s h, h"), {}, RuleError, "it has 2 outputs, the operator returns 1"),
    (("tests::gate", GATE[1]), {"at": (0, 2)}, RuleError, r"argument 2 is not a tensor; tensors are 0 \(x\), 1 \(scale\)"),
    (("tests::gate", "b s h, h"), {}, RuleError, "it needs exactly one '->'"),
    (("tests::gate", GATE[1]), {"linaer": [[0]]}, OptionError, "no property 'linaer'; did you mean 'linear'"),
    (("tests::gate", pointwise_rule()), {"linear": [[0]]}, OptionError, "linear cannot be given with a rule that is a function"),
    (("tests::gate", 3), {}, OptionError, "not an int"),
    (("aten::mm", "m k, k n -> m n"), {}, RuleError, "aten::mm has a rule already"),
    (("aten::add_.Tensor", "b, b -> b"), {}, RuleError, r"changes its arguments \(self\)"),
    (("aten::layer_norm", "b h!, h!, h!, h! -> b h!"), {"override": True}, RuleError, "takes 1 to 3 tensors"),
]


@pytest.mark.parametrize(("args", "options", "kind", "said"), REFUSED, ids=[r[3][:30] for r in REFUSED])
def test_refused_registrations(args: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], said: str) -> None:
    before = gate_specs()
    with pytest.raises(kind, match=said) as error:
        fxshard.register_rule(*args, **options)
    assert "to do: " in str(error.value) and gate_specs() == before


def test_registering_the_same_rule_again_is_no_error() -> None:
    """A notebook cell may run twice."""
    for _ in range(2):
        fxshard.register_rule("tests::gate", pointwise_rule())
    with pytest.raises(RuleError, match="has a rule already"):
        fxshard.register_rule("tests::gate", pointwise_rule((0,)))
    with pytest.raises(RuleError, match="has a rule already"):
        fxshard.register_rule("aten::mm", "m k, k n -> m n")


def test_a_rule_is_replaced_only_on_request() -> None:
    register_gate()
    with pytest.raises(RuleError, match="has a rule already"):
        fxshard.register_rule("tests::gate", "b s! h, h -> b s! h")
    assert gate_specs() == SHARDED
    fxshard.register_rule("tests::gate", "b s! h, h -> b s! h", override=True)
    assert gate_specs() == SHARDED - {"S(1), R -> S(1)"}


@pytest.mark.parametrize(
    ("properties", "what"),
    [
        ({"reduce": {"bb": "max"}}, "reduce names 'bb'"),
        ({"reduce": {"b": "bogus"}}, "reduce has 'bogus'"),
        ({"linear": [0]}, r"linear is \[0\]"),
        ({"linear": "x"}, "linear is 'x'"),
        ({"additive": (9,)}, "additive names operand 9"),
        ({"local": 3}, "local is an int"),
    ],
)
def test_invalid_values_of_properties(properties: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        fxshard.register_rule("tests::gate", "b s h, h -> b s h", **properties)
