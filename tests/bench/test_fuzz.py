"""A slice of ``make fuzz``: mutated files are refused by a FxshardError, or accepted and equal. Undamaged ones are read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.fuzz.run import Tally, original, run_here
from bench.fuzz.subjects import SHARES, Subject, cases, subjects

CASES = {"program": 60, "graph": 120, "flex": 200, "plan": 60, "checkpoint": 60, "hardware": 40, "solver": 40, "trace": 40}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Subject]]:
    return subjects(tmp_path_factory.mktemp("files"))


def test_every_kind_of_file_has_a_share(files: dict[str, list[Subject]]) -> None:
    assert set(SHARES) == set(files) == set(CASES)
    assert sum(cases(kind, 10_000) for kind in files) == 10_000 and min(cases(kind, 10_000) for kind in files) > 100


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured in /proc")
@pytest.mark.parametrize("kind", CASES)
def test_mutated_files(kind: str, files: dict[str, list[Subject]], tmp_path: Path) -> None:
    for subject in files[kind]:
        assert original(subject, tmp_path)
    tally = Tally()
    run_here(files[kind], 0, CASES[kind], 7, tmp_path, tally)
    assert not tally.faults
    assert tally.cases == CASES[kind] and tally.refused > tally.cases / 3
