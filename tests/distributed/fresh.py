"""Fresh processes that run an exported program over gloo and never import the model's code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from safetensors.torch import load_file, save_file
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=120))
import fxshard
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
"""
END = """
assert fxshard.__file__ == sys.argv[3], "another fxshard than the one under test"
assert not any(name.split(".")[0] in ("transformers", "zoo", "tests", "examples") for name in sys.modules), "the model's code was imported"
save_file(out, f"{folder}/out{rank}.safetensors")
dist.barrier()
"""


def run_fresh(body: str, folder: Path) -> None:
    """Runs ``body`` on two ranks. It may use ``mesh``, ``rank`` and ``folder``, and leaves the tensors to save in ``out``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + body + END, str(folder), str(r), str(ROOT / "fxshard" / "__init__.py")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        for r in ranks:
            assert r.wait(timeout=300) == 0, r.stderr and r.stderr.read()[-3000:]
    finally:
        for r in ranks:
            r.kill()
