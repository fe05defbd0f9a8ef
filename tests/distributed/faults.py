"""Ranks that fail on purpose. Their parent holds the store and, unlike an elastic agent, does not kill the survivors."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.errors import FxshardError
from fxshard.runtime.module.module import parallelize
from fxshard.runtime.ranks import heartbeat
from fxshard.runtime.ranks.watchdog import watching
from tests.distributed.scenarios import forks

START = 200.0  # seconds until all ranks are ready, on busy cores
TIMEOUT = 6.0  # seconds that a rank waits for the others
PERIOD = 0.2  # seconds between heartbeats: short, so that finding the cause takes little of the timeout
WARM = 2  # steps before anything fails


class Net(nn.Module):
    """With the plan of ``plan_of`` it has collectives in the forward and in the backward."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.c, self.a, self.b = (nn.Linear(8, 8, dtype=dtype) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.c(x).tanh()).tanh())


@dataclass(frozen=True)
class Fault:
    """How rank ``rank`` of ``mesh`` fails after its warm-up, and during what: "forward", "backward", "clip" or "save"."""

    how: str
    rank: int
    during: str = "forward"
    mesh: tuple[int, ...] = (2,)
    compiler: str = "eager"

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return f"{self.how}-rank{self.rank}-{self.during}-{mesh}-{self.compiler}"

    @property
    def world(self) -> int:
        return math.prod(self.mesh)


@dataclass(frozen=True)
class Survivor:
    """How a rank ended its last step: type and text of its error, and seconds since the step began."""

    kind: str
    text: str
    seconds: float


@cache
def plan_of(mesh: tuple[int, ...]) -> str:
    """A plan as JSON: tensor parallel on the last axis and, on a mesh of two axes, data parallel on the first."""
    front, batch = ("", "R") if len(mesh) == 1 else ("R", "S(0)")
    pins = {"a.weight": front + "S(0)", "b.weight": front + "S(1)", "a": (batch if front else "") + "S(1)"}
    axes = dict(zip(("dp", "tp")[2 - len(mesh) :], mesh, strict=True))
    inputs = {"args[0]": batch + ("R" if front else "")}
    x = torch.ones(64, 8, dtype=torch.float64)
    whole = front + "R"
    plan = fxshard.plan(Net(), (x,), fxshard.Mesh(axes), input_layouts=inputs, output_layouts=whole, pins=pins, cache=False)
    return plan.to_json()


def start(fault: Fault, folder: Path) -> dict[int, Survivor]:
    """Runs ``fault`` and returns how each rank ended. A rank that did not end by itself in time is missing."""
    (folder / "plan.json").write_text(plan_of(fault.mesh))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # not in a rank, so that it outlives them all
    context = forks()
    ranks = [context.Process(target=_rank, args=(fault, rank, store.port, str(folder)), daemon=True) for rank in range(fault.world)]
    for process in ranks:
        process.start()
    until = time.monotonic() + START
    survivors = [process for rank, process in enumerate(ranks) if rank != fault.rank]
    while time.monotonic() < until and any(process.is_alive() for process in survivors):
        time.sleep(0.05)
    for process in ranks:
        if process.is_alive():  # the number of one that has ended may be another process's by now
            process.kill()
    found = {rank: folder / f"{rank}.pt" for rank in range(fault.world)}
    return {rank: Survivor(*torch.load(path)) for rank, path in found.items() if path.exists()}


def _rank(fault: Fault, rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    heartbeat.PERIOD = PERIOD
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.world)
    mesh = init_device_mesh("cpu", fault.mesh, mesh_dim_names=("dp", "tp")[2 - len(fault.mesh) :])
    model, x = Net(), torch.ones(64, 8, dtype=torch.float64)
    plan = fxshard.ShardingPlan.load(Path(folder) / "plan.json")
    parallelize(model, (x,), mesh, plan, compiler=fault.compiler, timeout=TIMEOUT)
    for _ in range(WARM):
        model(x).sum().backward()
    dist.barrier()
    begun = time.monotonic()
    try:
        _step(model, x, fault if rank == fault.rank else None)
        met: tuple[str, str, float] = ("nothing", "", 0.0)
    except Exception as error:
        met = (type(error).__name__, str(error), time.monotonic() - begun)
        if rank == fault.rank:
            raise
        assert isinstance(error, FxshardError), error
    torch.save(met, Path(folder) / f"{rank}.new")
    os.replace(Path(folder) / f"{rank}.new", Path(folder) / f"{rank}.pt")


def _step(model: nn.Module, x: Tensor, fault: Fault | None) -> None:
    def perhaps(during: str) -> None:
        if fault is not None and fault.during == during:
            fail(fault.how)

    perhaps("forward")
    loss = model(x).sum()
    perhaps("backward")
    loss.backward()
    perhaps("clip")
    fxshard.clip_grad_norm_(model.parameters(), 1.0, timeout=TIMEOUT)
    with watching("save the checkpoint", timeout=TIMEOUT):
        perhaps("save")
        dist.barrier()


def fail(how: str) -> Any:
    if how in ("KILL", "STOP"):
        os.kill(os.getpid(), signal.Signals[f"SIG{how}"])
    elif how == "raise":
        raise ValueError("the loader broke")
    elif how == "end":
        raise SystemExit(0)
    elif how == "loop":
        while True:
            pass
