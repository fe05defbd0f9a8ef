"""Loops as machine code, also where nothing can be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = """
from fxshard.solver.problem.compiled import compiled

@compiled
def total(count):
    found = 0
    for i in range(count):
        found += i
    return found

print(total(5), len(total.signatures))
"""


@pytest.mark.parametrize("writable", [True, False])
def test_loops_are_compiled_whether_or_not_they_can_be_kept(writable: bool, tmp_path: Path) -> None:
    """Paths under a file cannot be made, not even by root; then a line says that every process compiles."""
    loop, file = tmp_path / "loop.py", tmp_path / "file"
    loop.write_text(LOOP)
    file.touch()
    if not writable:
        (tmp_path / "__pycache__").touch()
    nowhere = dict.fromkeys(("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "USERPROFILE", "LOCALAPPDATA"), str(file / "cache"))
    environment = {**os.environ, **nowhere, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, str(loop)], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "10 1\n"
    assert ("compiled in every process" in done.stderr) == (not writable)
    assert bool(list(tmp_path.glob("__pycache__/loop.total*.nbi"))) == writable


def test_who_plans_nothing_does_not_import_the_compiler() -> None:
    code = "import sys, fxshard; fxshard.parallelize; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
