"""Two ranks that run an exported program over gloo and never import the model's code: forks of a server that has not done so either."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import os, sys, traceback, torch, torch.distributed as dist
from datetime import timedelta
from safetensors.torch import load_file, save_file
import fxshard.runtime.exported
torch.set_num_threads(1)
for line in sys.stdin:
    folder = line.strip()
    if not (child := os.fork()):
        os.dup2(os.open(folder + "/stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            other = os.fork()
            exec(open(folder + "/ranks.py").read())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    print(os.waitpid(child, 0)[1], flush=True)
"""
BEGIN = """
rank = int(not other)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=120))
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
"""
END = """
assert fxshard.__file__ == sys.argv[1], "another fxshard than the one under test"
assert not any(name.split(".")[0] in ("transformers", "zoo", "tests", "examples") for name in sys.modules), "the model's code was imported"
save_file(out, f"{folder}/out{rank}.safetensors")
dist.barrier()
if other:
    assert os.waitpid(other, 0)[1] == 0, "the other rank failed"
"""


def run_fresh(body: str, folder: Path, *, inductor: bool = True, seconds: float = 300.0) -> None:
    """Runs ``body`` on two ranks. It may use ``mesh``, ``rank`` and ``folder``, and leaves the tensors to save in ``out``.

    ``inductor``: whether Inductor was imported before the ranks part."""
    (folder / "ranks.py").write_text(BEGIN + body + END)
    server = _server(inductor)
    server.stdin.write(f"{folder}\n")
    ready, _, _ = select.select([server.stdout], [], [], seconds)
    said = server.stdout.readline().strip() if ready else "no end"
    if not said.isdigit():
        server.kill()
        _server.cache_clear()
    assert said == "0", (folder / "stderr").read_text()[-6000:] if (folder / "stderr").exists() else f"the ranks did not start: {said}"


@cache
def _server(inductor: bool) -> Any:
    """Imports torch and fxshard, once per test process, and forks the ranks of each folder whose name it reads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = SERVER.replace("fxshard.runtime.exported", "fxshard.runtime.exported, torch._inductor.compile_fx") if inductor else SERVER
    command = [sys.executable, "-c", program, str(ROOT / "fxshard" / "__init__.py")]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
