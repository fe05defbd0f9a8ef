"""A fresh process that runs an exported program over gloo, forked into two ranks, and never imports the model's code."""

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
import fxshard.runtime.exported, torch._inductor.compile_fx
torch.set_num_threads(1)
folder, other = sys.argv[1], os.fork()  # importing torch and fxshard takes longer than most programs, so both ranks share it
rank = int(not other)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=120))
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
"""
END = """
assert fxshard.__file__ == sys.argv[2], "another fxshard than the one under test"
assert not any(name.split(".")[0] in ("transformers", "zoo", "tests", "examples") for name in sys.modules), "the model's code was imported"
save_file(out, f"{folder}/out{rank}.safetensors")
dist.barrier()
if other:
    assert os.waitpid(other, 0)[1] == 0, "the other rank failed"
"""


def run_fresh(body: str, folder: Path, *, inductor: bool = True) -> None:
    """Runs ``body`` on two ranks. It may use ``mesh``, ``rank`` and ``folder``, and leaves the tensors to save in ``out``.

    ``inductor``: whether to import Inductor before the ranks part."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    begin = BEGIN if inductor else BEGIN.replace(", torch._inductor.compile_fx", "")
    command = [sys.executable, "-c", begin + body + END, str(folder), str(ROOT / "fxshard" / "__init__.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-6000:]
