"""Questions on the command line: --explain, --why, diff, and whether a plan came from the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR

MODEL = """
import torch
from torch import nn

def training():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.ones(4, 16),)
"""
MESH = ["--mesh", "dp=2,tp=2", "--hardware", "h100"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FXSHARD_CACHE", "1")
    monkeypatch.setenv("FXSHARD_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py") + ":training"


def test_questions(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    pins = ["--pin", "0.weight=RS(0)", "--pin", "args[0]=RR"]
    assert cli.main(["plan", model, *MESH, *pins, "-o", first, "--explain", "2.weight", "--explain", "relu=S(0)R"]) == 0
    printed = capsys.readouterr().out
    assert "2.weight (parameter, node" in printed and "never gives it" not in printed
    assert printed.count("redistribution  ") == 2 and "cache" not in printed
    assert cli.main(["plan", model, *MESH, *pins, "-o", second]) == 0
    assert f"from the cache, {tmp_path / 'cache'}" in capsys.readouterr().out
    assert Path(first).read_bytes() == Path(second).read_bytes()
    assert cli.main(["plan", model, *MESH, *pins, "--no-cache"]) == 0
    assert "from the cache" not in capsys.readouterr().out

    assert cli.main(["diff", first, second]) == 0
    assert capsys.readouterr().out.startswith("the plans are equal: dp=2,tp=2 (h100)")
    assert cli.main(["inspect", first, "--why", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("collective 0: all_gather on tp") and "aten.relu.default" in printed
    assert "fxshard plan ... --explain 'relu=" in printed and "plan.explain" not in printed


def test_regret_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", model, *MESH, "--regret", "0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["regret"]
    assert found["error"] == 0.2 and len(found["losses"]) == 50 and found["losses"][-1] == found["most"] >= found["median"]


def test_wrong_questions(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", model, *MESH, "--explain", "0.wight", "-o", str(tmp_path / "a.json")]) == USER_ERROR
    assert "did you mean '0.weight'" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path / "a.json"), "--why", "7"]) == USER_ERROR
    said = capsys.readouterr().err
    assert "there is no collective 7" in said and "--collectives lists the collectives" in said and "(plan)" not in said
