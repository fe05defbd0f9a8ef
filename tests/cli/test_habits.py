"""What every command does: an example, ``--json``, completion, exit codes, silence in a pipe, no colours, no half-written file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxshard.cli import main as cli
from fxshard.cli.console import exit_codes, progress
from fxshard.files import atomic_file
from tests.plans.small_plans import small_plan


def fxshard(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fxshard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


COMMANDS = json.loads(fxshard("completion", "bash", "--json").stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"example:\n  {'source <(' if command == 'completion' else ''}fxshard {command}" in said
    assert "--json" in COMMANDS[command] and "exit codes: 0" in said


def completed(*words: str) -> list[str]:
    """What bash completes at the last word."""
    script = fxshard("completion", "bash").stdout
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _fxshard; printf "%s\\n" "${COMPREPLY[@]}"'
    ran = subprocess.run(["bash", "-c", f"{script}\n{ask}", "bash", "fxshard", *words], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    (tmp_path / "plan.json").touch()
    assert completed("exp") == ["export"]
    assert completed("plan", "--obj") == ["--objective"]
    assert completed("plan", "--objective", "") == ["time", "communication"]
    assert completed("inspect", f"{tmp_path}/pl") == [f"{tmp_path}/plan.json"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_read_their_scripts(shell: str, tmp_path: Path) -> None:
    said = fxshard("completion", shell).stdout
    assert all(command in said for command in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here to read the script")
    (tmp_path / "script").write_text(said)
    ran = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_light_commands_start_at_once(tmp_path: Path) -> None:
    """0.3 s of this process's time, the best of five: other work on the machine does not count."""
    small_plan().save(tmp_path / "plan.json")
    for arguments in (["completion", "bash"], ["inspect", str(tmp_path / "plan.json")], ["--help"]):
        assert min(_seconds(arguments) for _ in range(5)) < 0.3


def _seconds(arguments: list[str]) -> float:
    before = os.times()
    assert fxshard(*arguments).returncode == 0
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_a_pipe_gets_neither_colours_nor_progress(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    ran = fxshard("inspect", str(tmp_path / "plan.json"), NO_COLOR="1")
    assert ran.stderr == "" and "\x1b" not in ran.stdout and ran.returncode == 0
    assert fxshard("inspect", "nowhere.json").returncode == 2


def test_progress_shows_on_a_terminal_after_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "TICK", 0.02)
    with progress.progress("planning", 2) as told:
        told.finish()
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.progress("planning", 2) as told:
        told.finish()
        time.sleep(0.5)
    assert "planning: 1/2" in capsys.readouterr().err


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def command() -> None:
        with atomic_file(path) as file:
            file.write_text("half")
            raise KeyboardInterrupt

    assert exit_codes.ended(command) == exit_codes.INTERRUPTED == 130
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"] and "interrupted" in capsys.readouterr().err


def test_solve_and_diff_as_json(tmp_path: Path) -> None:
    problem = {
        "problem": {
            "name": "x",
            "nodes": {"intervals": [[0, 1]], "costs": [[3, 2]], "usages": [[0, 0]]},
            "edges": {"nodes": [], "costs": []},
        }
    }
    (tmp_path / "problem.json").write_text(json.dumps(problem))
    ran = fxshard("solve", str(tmp_path / "problem.json"), "--json")
    assert json.loads(ran.stdout)["choices"] == [1] and json.loads(ran.stdout)["cost"] == 2
    small_plan().save(tmp_path / "plan.json")
    found = json.loads(fxshard("diff", *[str(tmp_path / "plan.json")] * 2, "--json").stdout)
    assert found["objective"] == [10.75, 10.75] and found["moves"] == []
