"""The bench of operator coverage: a broad selection of operators, and its own logic."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from bench.operators import rules
from bench.operators.entries import entries, entry, samples, without_frozen_seeds
from bench.operators.measure import measure
from bench.operators.report import _general, causes, coverage_rows, exceptions
from bench.operators.truth import difference
from bench.operators.verdict import Finding, worst

ENTRIES = """
add matmul softmax sum cumsum sort index_select nn.functional.conv2d nn.functional.layer_norm nn.functional.dropout
exponential linalg.cholesky nonzero masked_select unique item equal __getitem__ empty_like istft cdist ones to_sparse
"""


@pytest.fixture(autouse=True)
def _original_operators() -> None:
    entries()
    without_frozen_seeds()


@pytest.mark.parametrize("key", ENTRIES.split())
def test_selected_operators_are_right(key: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = measure(key, 2, 3, ("ours",))
    assert record["ours"]["forward"]["kind"] == "right", record
    assert record["ours"]["backward"]["kind"] in ("right", "skipped") or key == "to_sparse", record


def test_samples_are_deterministic() -> None:
    one = entry("add", entries()["add"])
    first, second = samples(one, 3, 5), samples(one, 3, 5)
    assert [s.combinations for s in first] == [s.combinations for s in second]
    assert all(torch.equal(a, b) for s, t in zip(first, second, strict=True) for a, b in zip(s.tensors, t.tensors, strict=True))
    assert {s.world for s in first} == {2, 4} and all(len(s.combinations) <= 5 for s in first)


@pytest.mark.parametrize(
    ("have", "want", "said"),
    [
        (torch.ones(2), torch.ones(3), "is (2,)"),
        (torch.ones(2).double(), torch.ones(2), "float64"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), "off by"),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), "infinities"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "differs in 1 of 2"),
        (1, 2, "is '1', not '2'"),
        (True, 1, "is 'True'"),
    ],
)
def test_differences_are_found(have: Any, want: Any, said: str) -> None:
    assert said in str(difference([have], [want]))
    assert difference([want], [want]) is None


def test_an_entry_is_as_good_as_its_worst_combination() -> None:
    right, wrong, skipped = Finding("right"), Finding("wrong", "off"), Finding("skipped", "why", 0)
    assert worst([right, wrong, right]) == Finding("wrong", "off", 3)
    assert worst([skipped, right]) == Finding("right", "", 1)
    assert worst([skipped]).kind == "skipped"


def test_the_report_counts() -> None:
    def record(key: str, ours: str, theirs: str) -> dict[str, Any]:
        nothing = vars(Finding("skipped", "it has no gradient", 0))
        kinds = {"ours": ours, "dtensor": theirs}
        return {"key": key, **{side: {"forward": vars(Finding(kind, "said")), "backward": nothing} for side, kind in kinds.items()}}

    records = [record("a", "right", "no strategy"), record("b", "wrong", "right"), record("c", "skipped", "skipped")]
    rows = {row[0]: row[1:] for row in coverage_rows(records)}
    assert rows["entries right, forward"] == ("1 of 2", "1 of 2")
    assert rows["entries with a wrong answer, forward"] == ("1", "0")
    assert exceptions(records, "ours") == [("b", "forward", "wrong", "said")]
    assert causes(records) == [("forward", "no sharding strategy", 1, "a")]


@pytest.mark.parametrize(
    ("detail", "general"),
    [
        ("Expected reduction dim 0 to have", "Expected reduction dim N to have"),
        ("size (2, 3) of aten.mm.default, then [4,] and 5x6, too", "size N of OPERATOR, then N and N, too"),
        ("has -1 output", "has N output"),
    ],
)
def test_messages_are_generalised_to_one_cause(detail: str, general: str) -> None:
    assert _general(detail) == general


def test_operators_that_were_not_asked_are_no_exceptions() -> None:
    nothing: dict[str, Any] = {"valid": 0, "shards": False, "samples": 0, "note": ""}
    records = [{"key": "a", **nothing}, {"key": "b", **nothing, "samples": 3}, {"key": "aten.sym_size.int", **nothing}]
    records += [{"key": "c", "lost": "crash"}, {"key": "d", **nothing, "valid": 2}, {"key": "e", **nothing, "note": "why"}]
    assert [key for key, _ in rules.exceptions(records)] == ["b", "e"]
    assert rules.not_asked(records)[0] == ("a", rules.NO_SAMPLES) and [key for key, _ in rules.not_asked(records)][1:] == [
        "aten.sym_size.int",
        "c",
    ]
