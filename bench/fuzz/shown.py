"""What ``fxshard inspect`` does with a mutated file."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from fxshard.cli.main import main

PARTS = ("--nodes", "--params", "--collectives", "--graph")
OF_PLANS = ("--memory", "--timeline")
"""Parts for which a program is loaded, as its own reader does anyway."""


def shown_plan(path: Path, refused: bool) -> str:
    """What was wrong, "" if nothing. ``refused``: whether the strict reader refused the plan; then nothing of it may be shown."""
    hidden, wrong = _shown(path, (), (*PARTS, *OF_PLANS), ("--json",))
    if not wrong and hidden != refused:
        wrong = "refused by its reader, and shown" if refused else "accepted by its reader, and not shown"
    return wrong


def shown_anyway(path: Path, refused: bool) -> str:
    """The same for a file that somebody vouches for, of which more may be shown than its reader accepts."""
    return _shown(path, (), PARTS)[1]


def _shown(path: Path, *asked: tuple[str, ...]) -> tuple[bool, str]:
    """(whether something was refused, what was wrong)."""
    codes = []
    for options in asked:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            codes.append(main(["inspect", str(path), *options]))
        said = out.getvalue() + errors.getvalue()
        if codes[-1] not in (0, 2):
            trace = [line.strip() for line in errors.getvalue().split("\n\n")[0].splitlines()]
            places = "; ".join(line for line in trace if line.startswith("File"))[-300:]
            return False, f"inspect {' '.join(options)}: {trace[-1][:200]} ({places})"
        if any(ord(char) < 32 and char not in "\n\t" for char in said):
            return False, "inspect printed a control character"
    return 2 in codes, ""
