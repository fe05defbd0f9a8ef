"""A killed rank under torchrun, whose agent holds the store and ends all ranks as soon as one has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.faults import plan_of

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import fxshard
from tests.distributed.faults import Net
dist.init_process_group("gloo")
model, x = Net(), torch.ones(64, 8, dtype=torch.float64)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
fxshard.parallelize(model, (x,), mesh, fxshard.ShardingPlan.load(sys.argv[1]), compiler="eager", timeout=30.0)
model(x)
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
model(x)
"""


def test_a_survivor_prints_the_error_before_the_agent_ends_it(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_of((2,)))
    (tmp_path / "train.py").write_text(SCRIPT)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*start, "train.py", "plan.json"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode != 0
    said = r"rank 1 gives no sign of life: killed, stopped, or out of reach; rank 0 was in all_\w+ of '\w+' over tp \(collective 1 of"
    assert re.search(said, ran.stderr), ran.stderr[-3000:]
