"""Progress: a line on a terminal for every command that takes long, cleared before output; nothing in a pipe, or on other ranks."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxshard import progress
from fxshard.cli import main as cli
from tests.plans.small_plans import small_plan

SLOW = """
import time
print("the first line")
time.sleep(0.5)
print("half a", end=" ")
time.sleep(0.5)
print("line")
time.sleep(0.5)
def factory():
    raise ValueError("no model")
"""
OWN = """
import torch
if not hasattr(torch.ops.fxshard_progress, "double"):
    op = torch.library.custom_op("fxshard_progress::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
def double():
    return [(torch.ones(4, 4),)]
"""
AT_ONCE = """
import sys
from fxshard import progress
progress.PATIENCE, progress.TICK = 0.1, 0.02
from fxshard.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""The command ``fxshard`` with less patience."""


def on_terminal(*arguments: str, **environment: str) -> tuple[int, str]:
    """(exit code, what the command wrote to its terminal)."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", AT_ONCE, *arguments]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **environment})
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    return child.wait(timeout=60), said.decode()


def screen(said: str) -> list[str]:
    """The lines that stay on the terminal: what follows a carriage return overwrites what is there."""
    lines = []
    for line in said.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_command_on_a_terminal_shows_what_it_does_until_it_prints(tmp_path: Path) -> None:
    """While the user's file runs, which prints too, half a line included; then the error."""
    (tmp_path / "slow.py").write_text(SLOW)
    code, said = on_terminal("plan", f"{tmp_path}/slow.py:factory", "--mesh", "tp=2", RANK="0")
    assert code == 2 and said.count("slow.py:factory: 00:0") > 3
    lines = screen(said)
    assert lines[:2] == ["the first line", "half a line"] and lines[2].startswith(("The factory", "the factory"))
    assert not any("running" in line for line in lines)


def test_other_ranks_show_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    code, said = on_terminal("plan", f"{tmp_path}/slow.py:factory", "--mesh", "tp=2", RANK="1")
    assert code == 2 and "running" not in said and "\r" not in said.replace("\r\n", "")


def test_imports_of_torch_are_shown(tmp_path: Path) -> None:
    """``run`` has no progress of its own: the line is that of all commands."""
    for name in ("program.pt2", "inputs.safetensors"):
        (tmp_path / name).write_text("nothing of the kind")
    code, said = on_terminal("run", f"{tmp_path}/program.pt2", "--inputs", f"{tmp_path}/inputs.safetensors", "--simulate")
    assert code == 2 and "fxshard run: 00:0" in said and not any("fxshard run:" in line for line in screen(said))


def test_a_child_process_shows_its_own(tmp_path: Path) -> None:
    code, said = on_terminal("check-op", "aten.t.default", "--samples", "2", "--budget", "5")
    assert code == 0 and "checking aten.t.default: 00:0" in said and "fxshard check-op" not in said
    assert any(line.startswith("aten.t.default: right") for line in screen(said))  # builds for CUDA warn before that where there is no GPU


@pytest.mark.parametrize("json", [[], ["--json"]])
@pytest.mark.parametrize("op", ["aten.t.default", "fxshard_progress::double"])
def test_check_op_is_silent_in_a_pipe(op: str, json: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second has no rule: one is looked for."""
    (tmp_path / "own.py").write_text(OWN)
    sample = ["--sample", f"{tmp_path}/own.py:{op.partition('::')[2]}"] if "::" in op else ["--samples", "2"]
    assert cli.main(["check-op", op, *sample, "--budget", "5", *json]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.startswith("{" if json else op.partition("::")[0])


def test_a_pipe_gets_neither_colours_nor_progress(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    command = [sys.executable, "-c", AT_ONCE.replace("0.1", "0.0"), "inspect"]
    ran = subprocess.run([*command, f"{tmp_path}/plan.json"], capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert ran.stderr == "" and "\x1b" not in ran.stdout and ran.returncode == 0
    assert subprocess.run([*command, "nowhere.json"], capture_output=True).returncode == 2


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
