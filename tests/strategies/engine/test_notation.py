"""The text form of rules: what it can express, and its errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fxshard.errors import RuleError
from fxshard.strategies import Call, Operand, TensorMeta, einop_rule, pointwise_rule, rule
from fxshard.strategies.engine.factors import resolve


def _call(operands: list[tuple[int, ...]], outputs: list[tuple[int, ...] | None], args: tuple[Any, ...] | None = None) -> Call:
    metas = tuple(TensorMeta(s, torch.float32) for s in operands)
    outs = tuple(None if s is None else TensorMeta(s, torch.float32) for s in outputs)
    return Call("mylib.op.default", args or tuple(map(Operand, range(len(metas)))), (), metas, outs)


@pytest.mark.parametrize(
    ("pattern", "operands", "outputs", "text"),
    [
        ("b m k, b k n -> b m n", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], "b m k, b k n -> b m n"),
        ("(a b) c -> a b c", [(6, 4)], [(2, 3, 4)], "(a b) c -> a b c"),
        ("b h!, h! -> b h!, b", [(2, 3), (3,)], [(2, 3), (2,)], "b h!, h! -> b h!, b"),
        ("b (h d!) -> b h d!", [(2, 6)], [(2, 3, 2)], "b (h d!) -> b h d!"),
        ("k, k ->", [(3,), (3,)], [()], "k, k -> "),
        ("b 1 -> b", [(2, 1)], [(2,)], "b 1 -> b"),
        ("_ b -> b _", [(2, 3)], [(3, 4)], "i0_0! b -> b o0_1!"),
        ("head_1 d -> head_1 d", [(2, 3)], [(2, 3)], "head_1 d -> head_1 d"),
    ],
)
def test_patterns_that_parse(pattern: str, operands: list[Any], outputs: list[Any], text: str) -> None:
    assert str(rule(pattern)(_call(operands, outputs))) == text


def test_sizes_of_merged_dims_are_found() -> None:
    call = _call([(6, 4)], [(2, 3, 4)])
    _, sizes = resolve(rule("(a b) c -> a b c")(call), call)
    assert sizes == {"a": 2, "b": 3, "c": 4}


def test_factors_of_size_one_are_dropped() -> None:
    call = _call([(6,)], [(1, 6)])
    found, _ = resolve(rule("(a b) -> a b")(call), call)
    assert found.operands == ((("b",),),)


def test_ellipsis_is_aligned_to_the_right() -> None:
    found = rule("... h, ... h -> ... h")(_call([(2, 3, 4), (3, 4)], [(2, 3, 4)]))
    assert found.operands[0][1] == found.operands[1][0]


def test_optional_operands_are_left_out() -> None:
    layer = rule("b h, h, h -> b h", at=(0, 1, 2))
    assert len(layer(_call([(2, 3), (3,)], [(2, 3)], (Operand(0), None, Operand(1)))).operands) == 2


def test_a_scalar_in_a_linear_group_passes_avg_but_not_sum() -> None:
    affine = _call([(3,)], [(3,)], (Operand(0), 2.0))
    assert [g.ops for g in pointwise_rule((0, 1))(affine).linear] == [("avg",)]
    assert pointwise_rule((0, 1), ops=("sum", "product"))(affine).linear == ()
    assert len(pointwise_rule((0,))(affine).linear) == 1


def test_einop_rule_is_linear_in_each_operand() -> None:
    groups = einop_rule("m k, k n -> m n")(_call([(2, 3), (3, 4)], [(2, 4)])).linear
    assert [g.operands for g in groups] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("b m k", "exactly one '->'"),
        ("a -> b -> c", "exactly one '->'"),
        ("b $ -> b", "'$'"),
        ("(a b -> a b", "not closed"),
        ("a) -> a", "')'"),
        ("((a) b) -> a", "'('"),
        ("a a -> a", "'a' occurs twice"),
        ("... ... -> ...", "occurs twice"),
        ("(a ...) -> a", "'...'"),
    ],
)
def test_unreadable_patterns_say_where(pattern: str, what: str) -> None:
    with pytest.raises(RuleError, match=re.escape(what)) as error:
        rule(pattern)
    assert repr(pattern) in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "operands", "outputs", "what"),
    [
        ("m k, k n -> m n", [(2, 3), (4, 5)], [(2, 5)], "factor 'k' is both 3 and 4"),
        ("m k -> m", [(2, 3, 4)], [(2,)], "2 dims are named for a tensor of shape [2, 3, 4]"),
        ("m -> m", [(2,), (2,)], [(2,)], "it has 1 operands"),
        ("m -> m, m", [(2,)], [(2,)], "it has 2 outputs"),
        ("(a b) -> a b", [(7,)], [(2, 3)], "(a b) is 2 x 3, the dim has 7"),
    ],
)
def test_errors_of_misfits_have_pattern_and_shapes(pattern: str, operands: list[Any], outputs: list[Any], what: str) -> None:
    call = _call(operands, outputs)
    with pytest.raises(RuleError, match=re.escape(what)) as error:
        resolve(rule(pattern)(call), call)
    assert "mylib.op.default" in str(error.value)
    assert str(list(operands[0])) in str(error.value)
