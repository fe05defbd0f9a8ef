"""Where the store is: lost with rank 0, kept by torchrun's agent; and a save that one rank does not live to see the end of."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fxshard.errors import RunError
from fxshard.runtime import heartbeat
from fxshard.runtime.watchdog import watching
from tests.distributed.faults import plan_of
from tests.distributed.ranks import run_scenarios

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
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


def test_under_torchrun_the_error_is_printed_before_the_agent_ends_the_rank(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_of((2,)))
    (tmp_path / "train.py").write_text(SCRIPT)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*start, "train.py", "plan.json"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode != 0
    said = r"rank 1 gives no sign of life: killed, stopped, or out of reach; rank 0 was in all_\w+ of '\w+' over tp \(collective 1 of"
    assert re.search(said, ran.stderr), ran.stderr[-3000:]


def _save() -> None:
    with watching("save the checkpoint", timeout=20.0):
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(1.0)  # some beats
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def a_save() -> None:
    heartbeat.PERIOD = 0.2
    said = r"rank 1 gives no sign of life(.|\n)*rank 0 was in save the checkpoint, call 1(.|\n)*last seen in save the checkpoint"
    with pytest.raises(RunError, match=said):
        _save()


def own_errors_stay() -> None:
    """What the block itself raises is not changed, and afterwards the group waits as long as it did before."""
    heartbeat.PERIOD = 0.2
    with pytest.raises(KeyError, match="mine"), watching("look something up", timeout=1.0):
        raise KeyError("mine")
    if dist.get_rank() == 1:
        time.sleep(2.0)
    dist.all_reduce(torch.ones(1))


def test_what_is_watched_need_not_be_a_program(tmp_path: Path) -> None:
    said = run_scenarios({"own_errors_stay": own_errors_stay, "a_save": a_save}, 2, tmp_path, seconds=100.0)
    assert not said["own_errors_stay"], said
    assert said["a_save"] == "rank 1 did not come to the end of a_save", said  # rank 0 met its error, and nothing else
