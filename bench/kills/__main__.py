"""``python -m bench.kills``: an undisturbed run and a run under kills, and whether their results are bit-identical."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

from bench.kills.rank import Settings
from bench.kills.supervisor import differing, run
from fxshard.runtime.checkpoint import open_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kills", description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, help="of the kills; by default a new one each time")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--small", action="store_true", help="a smaller model")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"{given.steps} steps on 2 ranks, a checkpoint every {given.every}, {given.kills} kills, seed {seed}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = Settings(steps=given.steps, every=given.every, compiler=given.compiler, small=given.small)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folders = {"undisturbed": Path(name, "calm"), "under kills": Path(name, "killed")}
        for what, folder in folders.items():
            folder.mkdir()
            said = run(settings, folder, given.kills if what == "under kills" else 0, seed)
            rows.append((what, said.starts, said.steps_done, f"{said.seconds:.0f}", " ".join(map(str, said.killed_at))))
        calm, killed = (folder / "checkpoint" for folder in folders.values())
        count, other = len(open_checkpoint(calm).index.entries), differing(calm, killed)
    print(tabulate(rows, headers=("run", "starts", "steps computed", "seconds", "killed after step (0: while starting)")))
    print(f"tensors at the end: {count}, differing in a bit: {len(other)} {' '.join(other[:5])}".rstrip())
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
