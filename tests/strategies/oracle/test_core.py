"""The oracle on some of torch's core operators, with torch's own samples: no rule is wrong, no valid option is missing."""

from __future__ import annotations

import pytest
import torch

from fxshard._torch_compat.operators import operator_database
from fxshard.strategies.oracle import Sample, check_op, record, spread_out

OPERATORS = {
    "addmm": "aten.addmm.default",
    "add": "aten.add.Tensor",
    "nn.functional.relu": "aten.relu.default",
    "where": "aten.where.self",
    "amax": "aten.amax.default",
    "sum": "aten.sum.dim_IntList",
    "cumsum": "aten.cumsum.default",
    "sort": "aten.sort.default",
    "gather": "aten.gather.default",
    "scatter_add": "aten.scatter_add.default",
    "index_select": "aten.index_select.default",
    "permute": "aten.permute.default",
    "select_scatter": "aten.select_scatter.default",
    "gt": "aten.gt.Tensor",
}
COUNT = 4


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    entries = [e for e in operator_database() if e.name in OPERATORS]
    return record(OPERATORS.values(), entries)


@pytest.mark.parametrize("op", OPERATORS.values())
def test_rule(op: str, samples: dict[str, list[Sample]]) -> None:
    verdict = check_op(op, spread_out(samples[op], COUNT), budget=120)
    assert not verdict.fallback
    assert verdict.wrong == ()
    # On booleans, sums and comparisons are logical operators, which pass more reductions than rules for numbers offer.
    assert [str(f) for f in verdict.missing if f.sample.tensors[-1].dtype != torch.bool] == []


def test_all_kinds_of_samples_occur(samples: dict[str, list[Sample]]) -> None:
    tensors = [t for found in samples.values() for s in found for t in s.tensors]
    assert any(0 in t.shape for t in tensors)
    assert any(not t.shape for t in tensors)
    assert any(1 in t.shape for t in tensors)
    assert any(not t.is_contiguous() for t in tensors)
    assert {"torch.float64", "torch.int64", "torch.bool", "torch.complex128"} <= {str(t.dtype) for t in tensors}
