"""Loops compiled by Numba, also if its cache cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = """
from fxshard.compiled import compiled

@compiled
def total(count):
    found = 0
    for i in range(count):
        found += i
    return found

print(total(5), len(total.signatures))
"""


@pytest.mark.parametrize("writable", [True, False])
def test_loops_are_compiled_with_and_without_a_cache(writable: bool, tmp_path: Path) -> None:
    """A path below a file cannot be created, not even by root. Then a line says that every process compiles."""
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
