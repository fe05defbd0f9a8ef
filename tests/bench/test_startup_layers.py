"""The bench that compares many layers with few, on small counts: it prints the time of each and the ratio."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from bench.startup import layers
from bench.startup.layers import main


def test_planning_two_layers_against_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "disable", lambda level: None)  # a measurement usually runs in its own process
    monkeypatch.setattr(layers, "_in_fresh_process", lambda job, *given: job(*given))
    monkeypatch.setattr(layers.compileall, "compile_dir", lambda folder, quiet: None)
    assert main(["--layers", "1", "2", "--mesh", "dp=2,tp=2", "--no-compile"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert "1 layers, s" in head and row.startswith("trace, plan, lower") and row.endswith("0.0000%")


def test_a_measurement_has_a_process_and_empty_caches_of_its_own() -> None:
    folders = [layers._in_fresh_process(os.getenv, name) for name in ("TORCHINDUCTOR_CACHE_DIR", "FXSHARD_CACHE_DIR")]
    assert os.getpid() != layers._in_fresh_process(os.getpid)
    mine = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "FXSHARD_CACHE_DIR")]
    for folder in folders:
        assert folder and folder not in mine and not Path(folder).exists()


def test_one_count_of_layers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--layers", "1"])
    assert "expected 2 arguments" in capsys.readouterr().err
