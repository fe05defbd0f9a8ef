"""``torchrun -m fxshard run``: an exported program on two gloo ranks, with its weights inside or in a file per rank, or planned again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_run import exported, same
from tests.distributed.fresh import ROOT


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    two = ("--mesh", "dp=1,tp=2")
    for weights, exports, runs, files in (("inside", two, (), 0), ("per-rank", two, (), 2), ("inside", ("--replan",), two, 2)):
        program = exported(tmp_path, weights, *exports)
        assert len(list(tmp_path.glob("*.rank-*"))) == files
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fxshard", "run"]
        given = [
            str(program),
            "--inputs",
            str(tmp_path / "in.safetensors"),
            "-o",
            str(tmp_path / "out.safetensors"),
            "--compiler",
            "eager",
            *runs,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ran = subprocess.run([*launch, *given], env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert ran.stdout.count("outputs['logits']: [4, 8]") == 1, "one rank prints"
        same(tmp_path)
        (tmp_path / "out.safetensors").unlink()
