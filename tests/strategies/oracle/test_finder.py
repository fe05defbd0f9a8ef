"""Rules that the oracle finds by itself for operators of a user's library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard.errors import OptionError, RuleError
from fxshard.strategies.engine.notation import rule
from fxshard.strategies.engine.registry import temporary_rule
from fxshard.strategies.oracle import Sample, check_op, find_rule, given_samples, largest_kind
from tests.strategies.samples import real

LIBRARY = torch.library.Library("fxshard_found", "FRAGMENT")
OPERATORS = {
    "scale": ("(Tensor x, Tensor w) -> Tensor", lambda x, w: x * w),
    "affine": ("(Tensor x, Tensor w, Tensor b) -> Tensor", lambda x, w, b: x @ w + b),
    "norm": ("(Tensor x, float eps) -> Tensor", lambda x, eps: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()),
    "extremes": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x.amax(1), x.sum(0))),
    "mixed": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x.amax(0), x.sum(0))),
    "joint": (
        "(Tensor g, Tensor x, Tensor w, Tensor b) -> (Tensor, Tensor, Tensor)",
        lambda g, x, w, b: ((g * b.exp()) @ w, torch.einsum("abc,abd->cd", g * b.cos(), x), (g * b).sum((0, 1))),
    ),
    "noisy": ("(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x)),
    "count": ("(Tensor x) -> int", lambda x: int(x.sum())),
    "add_one": ("(Tensor(a!) x) -> ()", lambda x: None),
    "scaled_by": ("(Tensor x, float factor, Tensor y) -> Tensor", lambda x, factor, y: factor * x * y.cos()),
}
for _name, (_schema, _function) in OPERATORS.items():
    LIBRARY.define(f"{_name}{_schema}")
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@pytest.mark.parametrize(
    ("name", "args", "line"),
    [
        ("scale", (real(4, 6, 8), real(8)), '"a b c, c -> a b c", linear=[[0], [1]]'),
        ("affine", (real(5, 6), real(6, 7), real(7)), '"a b, b c, c -> a c", linear=[[0, 2], [1, 2]], additive=(2,)'),
        ("norm", (real(4, 6, 8), 1e-5), '"a b _ -> a b _"'),
        ("extremes", (real(6, 5),), "\"a b -> a, b\", reduce={'b': 'max'}"),
        ("scaled_by", (real(5, 6), 2.0, real(5, 6)), '"a b, a b -> a b", linear=[[0]]'),
    ],
)
def test_the_found_rule_is_printed_as_a_registration(name: str, args: tuple[Any, ...], line: str) -> None:
    found = find_rule(f"fxshard_found::{name}", [Sample(f"fxshard_found.{name}.default", args)])
    assert str(found) == f'fxshard.register_rule("fxshard_found::{name}", {line})'
    with temporary_rule(found.op, rule(found.pattern, **found.properties)):
        assert not check_op(found.op, [Sample(found.op, args)]).wrong


def test_a_backward_is_found_within_the_budget() -> None:
    """Most combinations are not tried; those that shard all dims of one size together are."""
    samples = [
        Sample("fxshard_found.joint.default", (real(a, b, c), real(a, b, d), real(c, d), real(c)))
        for a, b, c, d in ((4, 5, 6, 7), (6, 4, 9, 8))
    ]
    found = find_rule("fxshard_found::joint", samples, 300)
    assert found.pattern == "a b c, a b _, c _, c -> a b _, c _, c" and found.untried


def test_the_rule_of_a_known_operator_is_found_too() -> None:
    sample = Sample("aten.mm.default", (real(5, 6), real(6, 4)))
    assert str(find_rule("aten.mm.default", [sample])) == 'fxshard.register_rule("aten::mm", "a b, b c -> a c", linear=[[0], [1]])'


def test_options_that_the_notation_cannot_express_are_left_out() -> None:
    found = find_rule("fxshard_found::mixed", [Sample("fxshard_found.mixed.default", (real(6, 5),))])
    assert found.pattern == "_ a -> a, a"
    assert [str(o) for o in found.left_out] == ["S(0) -> P(max), P"]


def test_a_rule_must_hold_for_all_samples() -> None:
    """cumsum over dim 0 and over dim 1 together leave no dim that can be sharded."""
    samples = [Sample("aten.cumsum.default", (real(6, 5), dim)) for dim in (0, 1)]
    with pytest.raises(RuleError, match="fails on"):
        find_rule("aten.cumsum.default", [*samples, Sample("aten.cumsum.default", (real(6, 5), 7))])
    assert find_rule("aten.cumsum.default", samples).pattern == "_ _ -> _ _"


def test_samples_of_one_kind() -> None:
    """Conclusive samples are preferred to a larger number of inconclusive ones."""
    few, more = [[Sample("aten.sin.default", (real(*shape),)) for _ in range(n)] for shape, n in (((4, 5), 1), ((), 3))]
    assert largest_kind([*more, *few]) == few and largest_kind(more) == more and largest_kind([]) == []


def test_unusable_samples_are_refused() -> None:
    op = "fxshard_found.scale.default"
    with pytest.raises(RuleError, match="different numbers of dims"):
        find_rule(op, [Sample(op, (real(4, 6), real(6))), Sample(op, (real(4, 5, 6), real(6)))])
    with pytest.raises(RuleError, match="is conclusive"):
        find_rule(op, [Sample(op, (real(4, 6), real(3)[:1]))])
    with pytest.raises(OptionError, match="there is no operator"):
        find_rule("fxshard_found::scales", [])
    for wrong in (None, [], real(3), [real(3)]):
        with pytest.raises(OptionError, match="argument tuples"):
            given_samples(op, wrong, "file.py:samples")
    assert given_samples("aten.sum.dim_IntList", [((real(3),), {"dim": [0]})], "")[0].kwargs == {"dim": [0]}


@pytest.mark.parametrize(
    ("name", "what", "remedy"),
    [
        ("noisy", "fxshard_found::noisy gives other numbers each time that it runs, so no rule can be checked", "pass them as an argument"),
        ("count", "fxshard_found::count returns a plain int; only tensors have placements", "a tensor without dims"),
        ("add_one", r"fxshard_found::add_one changes its arguments \(x\)", "returns new tensors"),
    ],
)
def test_operators_that_cannot_have_a_rule(name: str, what: str, remedy: str) -> None:
    with pytest.raises(RuleError, match=what) as error:
        find_rule(f"fxshard_found::{name}", [Sample(f"fxshard_found.{name}.default", (real(4, 6),))])
    assert remedy in str(error.value.remedy)
