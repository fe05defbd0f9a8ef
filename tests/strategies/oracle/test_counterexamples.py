"""Calls whose plain arguments or dtypes change what is legal: negative factors, slices that start before 0, means of integers."""

from __future__ import annotations

from typing import Any

import pytest

from fxshard.strategies.oracle import Sample, check_op
from tests.strategies.samples import real, whole

X, Y, N = real(12, 3), real(3, 12).mT, whole(9, 12, 3)
END = 2**63 - 1
CALLS: list[tuple[Any, ...]] = [
    ("aten.slice.Tensor", (X, 0, -100, END)),
    ("aten.slice.Tensor", (X, 0, -23, END, 3)),
    ("aten.slice_backward.default", (X, [12, 3], 0, -100, END, 1)),
    ("aten.slice_scatter.default", (X, Y, 0, -100, END)),
    ("aten.add.Tensor", (X, Y), {"alpha": -2}),
    ("aten.sub.Tensor", (X, Y), {"alpha": -2}),
    ("aten.rsub.Scalar", (X, 2.0, -1)),
    ("aten.rsub.Tensor", (X, Y), {"alpha": 3}),
    ("aten.leaky_relu.default", (X, -0.5)),
    ("aten.elu.default", (X, -1.0)),
    ("aten.leaky_relu.default", (X, 0.0)),
    ("aten.softplus.default", (X, 1.0, 0.0)),
    ("aten.softplus.default", (X, -1.0, 20.0)),
    ("aten.pow.Tensor_Scalar", (X, float("inf"))),
    ("aten._foreach_neg.default", ([X, Y],)),
    ("aten._foreach_mul.ScalarList", ([X, Y], [2, -2])),
    ("aten._foreach_sub.List", ([X, Y], [Y, X])),
    ("aten._foreach_add.List", ([N, N], [N, N])),
    ("aten._foreach_pow.ScalarList", ([X, Y], [2, 3])),
    ("aten.scatter_reduce.two", (N, 0, whole(12, 12, 3), N, "mean")),
]


@pytest.mark.parametrize("call", CALLS, ids=[f"{op}-{i}" for i, (op, *_) in enumerate(CALLS)])
def test_no_rule_is_wrong(call: tuple[Any, ...]) -> None:
    op, args, *kwargs = call
    verdict = check_op(op, [Sample(op, args, *kwargs)], budget=1)
    assert not verdict.fallback and not verdict.judged[0].skipped
    assert [str(f) for f in verdict.wrong] == []
