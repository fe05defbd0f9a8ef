"""The bench of many layers beside few, on few small ones: it says what each took, and how many times as long."""

from __future__ import annotations

import pytest

from bench.startup.layers import main


def test_planning_of_many_layers_beside_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layers", "1", "2", "--mesh", "dp=2,tp=2", "--no-compile"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert "1 layers, s" in head and row.startswith("trace, plan, lower") and row.endswith("0.0000%")


def test_one_count_of_layers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--layers", "1"])
    assert "expected 2 arguments" in capsys.readouterr().err
