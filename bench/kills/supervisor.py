"""Starts ranks, kills one of them at random times, and starts all again, until the run is through."""

from __future__ import annotations

import math
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from bench.kills.rank import Settings, log_of, main
from fxshard.errors import RunError
from fxshard.runtime.checkpoint import open_checkpoint

SECONDS = 1800
"""After this long without an end the ranks are ended and the run fails."""
_CONTEXT: Any = mp.get_context("forkserver")  # torch is imported once, in the server, not at each start of a rank
_CONTEXT.set_forkserver_preload(["bench.kills.rank", "fxshard.runtime.backend.backend", "torch._inductor.compile_fx"])
_STEP = re.compile(rb"step (\d+) ")


@dataclass
class Run:
    """What a run was: after which step of its own each kill came, how many steps were done in all, and its wall time."""

    killed_at: list[int] = field(default_factory=list)
    starts: int = 0
    steps_done: int = 0
    seconds: float = 0.0


def run(settings: Settings, folder: Path, kills: int, seed: int) -> Run:
    """Trains in ``folder`` to the last step, with ``kills`` SIGKILLs of random ranks on the way; raises RunError when a rank fails.

    Kills come evenly over the steps on average: each at a random step that nobody has reached yet, after a random part of
    a second, so that they meet forward, backward, the optimiser and saving alike; every fourth one while the ranks start.
    However fast the steps are, every kill happens: ranks wait for a pending one before they save the last step.
    """
    draw, said, start = random.Random(seed), Run(), time.monotonic()
    steps = sorted(draw.sample(range(1, settings.steps), kills))
    lives = [Kill(0, draw.uniform(0.5, 6.0)) if i % 4 == 3 else Kill(step, draw.uniform(0.0, 0.3)) for i, step in enumerate(steps)]
    while True:
        said.starts += 1
        kill = lives.pop(0) if lives else None
        if _one_life(settings, folder, said, kill, draw.randrange(settings.ranks), start + SECONDS):
            said.seconds = time.monotonic() - start
            return said


@dataclass(frozen=True)
class Kill:
    """``wait`` seconds after the end of ``step``; 0: after the start."""

    step: int
    wait: float


def _one_life(settings: Settings, folder: Path, said: Run, kill: Kill | None, victim: int, until: float) -> bool:
    """From the start of all ranks to a kill or the end; whether it was the end."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    log, due = log_of(folder, 0), math.inf
    log.unlink(missing_ok=True)
    given = [(settings, folder, r, store.port, kill is not None) for r in range(settings.ranks)]
    ranks = [_CONTEXT.Process(target=main, args=args, daemon=True) for args in given]
    for rank in ranks:
        rank.start()
    try:
        while True:
            codes = [rank.exitcode for rank in ranks]
            if any(codes) or time.monotonic() > until:
                raise RunError(f"the ranks ended with {codes}", where=str(folder), remedy="read the ranks' messages above")
            if set(codes) == {0}:
                return True
            if kill is not None and _step(log) >= kill.step:
                due = min(due, time.monotonic() + kill.wait)
            if time.monotonic() >= due:
                ranks[victim].kill()
                said.killed_at.append(_step(log))
                return False
            time.sleep(0.01)
    finally:
        for rank in ranks:  # those that survive a kill are ended: all begin again from one checkpoint
            rank.kill()
        for rank in ranks:
            rank.join()
        said.steps_done += log.read_bytes().count(b"\n") if log.exists() else 0


def _step(log: Path) -> int:
    """The last step in a rank's output; 0 before the first."""
    found = _STEP.findall(log.read_bytes() if log.exists() else b"")
    return int(found[-1]) if found else 0


def differing(one: Path, other: Path) -> list[str]:
    """What two checkpoints do not have alike, bit for bit: tensors by name, and ``values`` for the rest; [] for nothing."""
    a, b = open_checkpoint(one), open_checkpoint(other)
    names = sorted(set(a.index.entries) ^ set(b.index.entries))
    for name in sorted(set(a.index.entries) & set(b.index.entries)):
        x, y = a.whole(name), b.whole(name)
        if x.dtype != y.dtype or x.shape != y.shape or x.numpy().tobytes() != y.numpy().tobytes():
            names.append(name)
    return names + (["values"] if a.index.values != b.index.values else [])
