"""Starts ranks, kills one of them at random times, and restarts all, until the run is complete."""

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
"""After this time the ranks are ended and the run fails."""
_CONTEXT: Any = mp.get_context("forkserver")  # the server imports torch once, instead of each rank at each start
_CONTEXT.set_forkserver_preload(["bench.kills.rank", "fxshard.runtime.backend.backend", "torch._inductor.compile_fx"])
_STEP = re.compile(rb"step (\d+) ")


@dataclass
class Run:
    """The history of a run: the step of the killed rank after which each kill came, the starts, all steps done, and the wall time."""

    killed_at: list[int] = field(default_factory=list)
    starts: int = 0
    steps_done: int = 0
    seconds: float = 0.0


def run(settings: Settings, folder: Path, kills: int, seed: int) -> Run:
    """Trains in ``folder`` to the last step, with ``kills`` SIGKILLs of random ranks meanwhile; raises RunError if a rank fails.

    Kills are spread evenly over the steps: each comes at a random step that no rank has reached yet, after a random fraction of a second,
    so that it can hit the forward, the backward, the optimiser or a save. Every fourth one comes while the ranks start. Every kill happens,
    however fast the steps are: ranks wait for a pending kill before they save the last step.
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
    """Runs all ranks until a kill or the end; returns whether it was the end."""
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
        for rank in ranks:  # ranks that survive a kill are ended too: all restart from one checkpoint
            rank.kill()
        for rank in ranks:
            rank.join()
        said.steps_done += log.read_bytes().count(b"\n") if log.exists() else 0


def _step(log: Path) -> int:
    """The number of the last step in a rank's output; 0 before the first."""
    found = _STEP.findall(log.read_bytes() if log.exists() else b"")
    return int(found[-1]) if found else 0


def differing(one: Path, other: Path) -> list[str]:
    """The differences between two checkpoints, bit for bit: names of tensors, and ``values`` for everything else; [] if they are equal."""
    a, b = open_checkpoint(one), open_checkpoint(other)
    names = sorted(set(a.index.entries) ^ set(b.index.entries))
    for name in sorted(set(a.index.entries) & set(b.index.entries)):
        x, y = a.whole(name), b.whole(name)
        if x.dtype != y.dtype or x.shape != y.shape or x.numpy().tobytes() != y.numpy().tobytes():
            names.append(name)
    return names + (["values"] if a.index.values != b.index.values else [])
