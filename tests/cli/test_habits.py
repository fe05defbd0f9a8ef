"""What every command does: an example, ``--json``, completion, exit codes, no half-written file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxshard.cli import main as cli
from fxshard.cli.console import exit_codes
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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--memroy-limit 10GB", "did you mean '--memory-limit'?"),
        ("--memory-limit 10 GB", "unrecognized arguments: GB; a value is one word"),
        ("--memroy-limit=10GB", "did you mean '--memory-limit'?"),
    ],
)
def test_unknown_words_are_refused_by_the_command(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "model.py:make", "--mesh", "tp=2", *words.split()])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and hint in said and "fxshard plan --help" in said


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


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def command() -> None:
        with atomic_file(path) as file:
            file.write_text("half")
            raise KeyboardInterrupt

    assert exit_codes.ended(command) == exit_codes.INTERRUPTED == 130
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"] and "interrupted" in capsys.readouterr().err


INTERRUPTED = """
import os, time
from pathlib import Path
import torch

def begin_and_wait(*_):
    Path({begun!r}).touch()
    time.sleep(100)

def loading():
    begin_and_wait()

def writing():
    os.replace = begin_and_wait
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
"""


@pytest.mark.parametrize("factory", ["loading", "writing"])
def test_ctrl_c_ends_an_export_without_half_a_file(factory: str, tmp_path: Path) -> None:
    """A real signal, while the model loads, and when all is written but not yet moved over the old file."""
    (begun := tmp_path / "marks").mkdir()
    (out := tmp_path / "out").mkdir()
    (out / "model.pt2").write_text("old")
    (tmp_path / "model.py").write_text(INTERRUPTED.format(begun=str(begun / "begun")))
    command = [sys.executable, "-m", "fxshard", "export", f"{tmp_path}/model.py:{factory}", "--mesh", "tp=2", "--no-cache"]
    heeded = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  (a shell's background jobs ignore it)
    child = subprocess.Popen([*command, "-o", f"{out}/model.pt2"], stderr=subprocess.PIPE, text=True, preexec_fn=heeded)
    try:
        until = time.monotonic() + 120
        while not any(begun.iterdir()):
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        assert any(file.suffix == ".tmp" for file in out.iterdir()) == (factory == "writing")
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 130 and "interrupted" in said
    assert [(file.name, file.read_text()) for file in out.iterdir()] == [("model.pt2", "old")]


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
