"""The files that ``fxshard run`` writes: each of its own, tensors before the profile, and a profile for the sizes of the call."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR
from fxshard.errors import FileError
from fxshard.passes.after_lowering.schedule import predicted
from fxshard.runtime.exported import ExportedProgram
from fxshard.runtime.measure.profile import StepProfile

MESH = fxshard.Mesh({"tp": 1}, hardware="cpu")
ROWS = 4000


def linear(rows: int, **options: Any) -> ExportedProgram:
    torch.manual_seed(0)
    return fxshard.export(nn.Linear(64, 64), (torch.zeros(rows, 64),), MESH, **options)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (("-o", "a", "--updated-weights", "a"), "--output and --updated-weights name the same file"),
        (("-o", "a", "--profile", "./a"), "--output and --profile name the same file"),
        (("--updated-weights", "a", "--profile", "b/../a"), "--updated-weights and --profile name the same file"),
    ],
)
def test_no_file_is_written_twice(
    files: tuple[str, ...], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the program is read: these files hold nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("program.pt2", "in.safetensors"):
        Path(name).write_text("nothing")
    Path("b").mkdir()
    assert cli.main(["run", "program.pt2", "--inputs", "in.safetensors", *files]) == USER_ERROR
    assert what in capsys.readouterr().err and not Path("a").exists()


def test_outputs_outlive_a_profile_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear(4, dynamic_shapes=({0: torch.export.Dim("rows")},)).save(tmp_path / "program.pt2")
    save_file({"args[0]": torch.ones(ROWS, 64)}, tmp_path / "in.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    made: list[StepProfile] = []

    def save(profile: StepProfile, path: str) -> None:
        made.append(profile)
        raise FileError("the disk is full", where=path)

    monkeypatch.setattr(StepProfile, "save", save)
    files = ["--inputs", str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out"), "--profile", str(tmp_path / "trace.json")]
    assert cli.main(["run", str(tmp_path / "program.pt2"), *files, "--compiler", "eager", "--device", "cpu"]) == USER_ERROR
    assert load_file(tmp_path / "out")["outputs"].shape == (ROWS, 64)
    assert made[0].predicted.total == pytest.approx(predicted(linear(ROWS)).total)


def test_waits_of_aot_inductor_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before any process group is made."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    mesh = fxshard.Mesh({"tp": 2})
    program = fxshard.export(nn.Linear(8, 8), (torch.zeros(4, 8),), mesh, input_layouts="S(0)", output_layouts="R")
    program.save(tmp_path / "program.pt2")
    save_file({"args[0]": torch.ones(4, 8)}, tmp_path / "in.safetensors")
    files = ["--inputs", str(tmp_path / "in.safetensors"), "--profile", str(tmp_path / "trace.json")]
    assert cli.main(["run", str(tmp_path / "program.pt2"), *files, "--compiler", "aot_inductor"]) == USER_ERROR
    assert "waits cannot be measured" in capsys.readouterr().err and not (tmp_path / "trace.json").exists()
