"""Progress of the demo: a bar on a terminal, one line elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from fxshard.runtime.demo import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    assert list(progress("abc", 3)) == ["a", "b", "c"]
    assert "100%" in screen.getvalue() and "3/3" in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_progress_is_a_line_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress("abc", 3)) == ["a", "b", "c"]
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.startswith("3 steps in ") and printed.out.count("\n") == 1
