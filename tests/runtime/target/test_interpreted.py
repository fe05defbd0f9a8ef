"""The Triton kernels of two small models, run by Triton's interpreter with real numbers, against the same programs run eagerly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.runtime.target.test_compile_for import ROOT, TRITON, needs_triton

SCRIPT = ROOT / "tests/runtime/target/interpreted.py"
TOLERANCE = 2e-6
"""Relative, float32."""


@needs_triton
@pytest.mark.parametrize(("name", "results"), [("perceptron", 8), ("gated", 6)])
def test_interpreted_kernels_equal_eager(name: str, results: int) -> None:
    paths = os.pathsep.join([str(ROOT), str(TRITON), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT), name], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["kernels"]) >= 15
    assert said["missing"] == [], "functions that the interpreter lacks"
    assert len(said["errors"]) == results  # the loss and each parameter's gradient
    assert max(said["errors"]) < TOLERANCE
