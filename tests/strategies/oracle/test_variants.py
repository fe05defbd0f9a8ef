"""Samples with other plain numbers: a rule that is right for some numbers only is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fxshard.strategies.engine.factors import Rule
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.registry import temporary_rule
from fxshard.strategies.oracle import Sample, find_rule, judge
from fxshard.strategies.oracle.variants import variants
from tests.strategies.samples import real, whole

X, Y = real(12, 3), real(3, 12).mT
LIBRARY = torch.library.Library("fxshard_plain", "FRAGMENT")
LIBRARY.define("shifted(Tensor x, int dim, float shift=0.) -> Tensor")
LIBRARY.impl("shifted", lambda x, dim, shift=0.0: x.flip(dim) + shift, "CompositeExplicitAutograd")


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        ("aten.leaky_relu.default", (X, 0.5), {}, [(-0.5,), (0.0,), (1.5,)]),
        ("aten.leaky_relu.default", (X,), {}, [(-0.01,), (0.0,), (-0.99,), (1.01,)]),  # the default is varied
        ("aten.add.Tensor", (X, Y), {}, [(-1,), (0,), (2,)]),
        ("aten.add.Tensor", (X, Y), {"alpha": 2}, [(-2,), (0,), (1,), (3,)]),
        (
            "aten.hardtanh.default",
            (X,),
            {},
            [(1,), (0,), (-2,), (-1, -1), (-1, 0), (-1, 2)],
        ),  # one number at a time
        ("aten._foreach_mul.ScalarList", ([X, Y], [2, 2]), {}, [*((n, 2) for n in (-2, 0, 1, 3)), *((n, n) for n in (-2, 0, 1, 3))]),
        ("aten.masked_fill.Scalar", (X, X > 0, float("inf")), {}, [(-float("inf"),), (0.0,)]),
        ("aten.sum.dim_IntList", (X, [1], True), {}, []),  # dims, sizes and booleans are not varied
        ("aten.upsample_nearest1d.default", (real(2, 3, 4), [8], 2.0), {}, []),
    ],
)
def test_one_number_changes_at_a_time(op: str, args: Any, kwargs: Any, expected: list[Any]) -> None:
    leaves = (pytree.tree_leaves((s.args, s.kwargs)) for s in variants(Sample(op, args, kwargs)))
    assert [tuple(a for a in found if not isinstance(a, torch.Tensor)) for found in leaves] == expected


@pytest.mark.parametrize(
    ("op", "args", "wrong"),
    [
        ("aten.add.Tensor", (X, Y), pointwise_rule((0, 1), increasing=(0, 1))),  # decreasing in y if alpha < 0
        ("aten.leaky_relu.default", (X, 0.5), pointwise_rule(increasing=(0,))),
        ("aten.pow.Tensor_Scalar", (X, 3), pointwise_rule(increasing=(0,))),
        ("aten.masked_fill.Scalar", (X, X > 0, 0), pointwise_rule((0,))),
        ("aten.mul.Scalar", (X, 2.0), pointwise_rule(increasing=(0,))),
    ],
)
def test_a_rule_that_is_right_only_for_the_sample_is_wrong(op: str, args: Any, wrong: Rule) -> None:
    sample = Sample(op, args)
    assert not judge(sample).wrong
    with temporary_rule(op, wrong):
        found = judge(sample, 1)
    assert found.variants and found.wrong
    assert all(f.sample is not sample for f in found.wrong)


def test_variants_without_finite_results_are_not_judged() -> None:
    assert judge(Sample("aten.fmod.Scalar", (whole(9, 5, 6), 1)), 1).variants == 2  # division by zero fails
    assert judge(Sample("aten.div.Scalar", (torch.ones(5, 6, dtype=torch.float64), 1.0)), 1).variants == 2  # by zero all is infinite


def test_a_kernel_outside_of_its_domain_is_not_judged() -> None:
    """With a negative delta, the vectorised part of this kernel takes other branches than its scalar remainder."""
    assert not judge(Sample("aten.huber_loss_backward.default", (real(5, 5), real(5, 6)[:, :5], real(6, 5)[:5], 0, 1.0)), 1).wrong


def test_a_found_rule_holds_for_other_numbers() -> None:
    """The operator is linear only with the default shift = 0."""
    found = find_rule("fxshard_plain::shifted", [Sample("fxshard_plain.shifted.default", (real(6, 5), 1))])
    assert str(found) == 'fxshard.register_rule("fxshard_plain::shifted", "a _ -> a _")'
