"""Export with dynamic sizes from the command line: options, what ``inspect`` shows, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fxshard
from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR

MODEL = """
import torch
from torch import nn

class Rows(nn.Linear):
    def forward(self, x):
        assert x.shape[0] < 1000
        return super().forward(x)

def rows():
    torch.manual_seed(0)
    return Rows(16, 8), (torch.ones(4, 16),)

def fixed():
    return nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (4, 16))), (torch.ones(4, 16),)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def test_export_and_inspect(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "m.pt2")
    command = ["export", f"{model}:rows", "--mesh", "tp=2", "--dynamic", "args[0]:0=batch", "--input-layout", "S(0)", "-o", output]
    assert cli.main(command) == 0
    assert cli.main(["inspect", output]) == 0
    said = capsys.readouterr().out
    assert "batch x 16" in said and "dim 0 of args[0]" in said, "shapes and dims in the user's names"
    assert "batch < 1000" in said and "model.py:7" in said, "the guard, and the line that asks for it"
    x = torch.randn(7, 16)
    weights = fxshard.load(output).weights
    want = torch.nn.functional.linear(x, weights["weight"], weights["bias"])
    torch.testing.assert_close(fxshard.simulate(fxshard.load(output), (x,)).outputs, want)


def test_even_and_as_json(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "m.pt2")
    command = ["export", f"{model}:rows", "--mesh", "tp=2", "--dynamic", "args[0]:0=batch", "--input-layout", "S(0)", "-o", output]
    assert cli.main([*command, "--even"]) == 0
    assert "at least 1, multiples of 2" in capsys.readouterr().out
    assert cli.main(["inspect", output, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (size,) = said["sizes"]
    assert (size["name"], size["places"], size["multiple_of"], size["example"]) == ("batch", [["args[0]", 0]], 2, 4)
    assert said["guards"][0]["condition"] == "batch < 1000" and said["outputs"][0]["shape"] == ["batch", 8]
    for table in ("--memory", "--timeline", "--collectives"):
        assert cli.main(["inspect", output, table]) == 0


def test_wrong_dynamic_options_are_refused(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for factory, dynamic, what in (
        ("rows", "args[0]:0", "cannot read 'args[0]:0'"),
        ("rows", "args[0]:2=batch", "args[0] has no dim 2"),
        ("fixed", "args[0]:0=batch", "batch (dim 0 of args[0]) cannot change, the model fixes it to 4"),
    ):
        command = ["export", f"{model}:{factory}", "--mesh", "tp=2", "--dynamic", dynamic, "-o", str(tmp_path / "m.pt2")]
        assert cli.main(command) == 2
        assert what in capsys.readouterr().err


def test_a_limit_at_the_largest_size(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", f"{model}:rows", "--mesh", "tp=2", "--no-cache", "--dynamic", "args[0]:0=batch<=64", "--memory-limit", "1MB"]
    assert cli.main([*command, "--at", "batch=65"]) == USER_ERROR
    assert "must be from 1 to 64" in capsys.readouterr().err
    assert cli.main([*command, "--at", "batch=32"]) == 0
    assert "at batch=64" in capsys.readouterr().out


def test_refused_sizes_do_not_hide_the_others(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One size breaks a guard of the plan, and one is impossible for a batch."""
    command = ["plan", f"{model}:rows", "--mesh", "tp=2", "--no-cache", "--dynamic", "args[0]:0=batch"]
    assert cli.main([*command, "--at", "batch=8", "--at", "batch=2000", "--at", "batch=0", "--at", "batch=7"]) == USER_ERROR
    said, refused = capsys.readouterr()
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("at ")] == ["at batch=8", "at batch=7"]
    assert "does not serve batch=2000: the model takes for granted that batch < 1000" in refused and "batch cannot be 0" in refused
    assert cli.main([*command, "--at", "batch=8"]) == 0


@pytest.mark.parametrize(
    ("dynamic", "at", "what"),
    [
        ([], "batch=4", "the plan has no dynamic dims"),
        (["--dynamic", "args[0]:0=batch"], "seq=4", "no dynamic dim is called 'seq'"),
        (["--dynamic", "args[0]:0=batch"], "batch=0", "batch cannot be 0"),
    ],
)
def test_an_impossible_size_is_refused_before_planning(
    model: str, dynamic: list[str], at: str, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxshard.api.plan", lambda *_, **__: pytest.fail("it was planned"))
    assert cli.main(["plan", f"{model}:rows", "--mesh", "tp=2", *dynamic, "--at", at]) == USER_ERROR
    assert what in capsys.readouterr().err
