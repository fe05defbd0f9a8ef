"""``python -m bench.training``: milliseconds of a training step on two gloo ranks with one thread each; all ways take turns in one run.

``ratio`` is the median time over that of compiled ``parallelize_module``. fxshard makes gloo's network threads batch threads, as always
(decision 0033); the others run with gloo's default threads, and in the last column with batch threads.

``--sizes 256/128,512/256`` sets widths and lengths, ``--rounds`` how often each way is timed, ``--only`` a part of a way's name (may be
repeated), ``--hardware`` the hardware for which fxshard plans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tabulate import tabulate

RANKS = 2
BASE = "parallelize_module, compiled"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--sizes", default="256/128,512/256")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--hardware", default="cpu", help="hardware of fxshard's plans: a preset, or a file of `fxshard calibrate`")
    parser.add_argument("--details", action="store_true", help="print the plans")
    chosen = parser.parse_args(arguments)
    for size in chosen.sizes.split(","):
        times = _measured(size, chosen)
        print(f"width {size.replace('/', ', length ')}\n{_table(times)}\n", flush=True)
    return 0


def _measured(size: str, chosen: Any) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        job = {"size": size, "rounds": chosen.rounds, "only": chosen.only, "folder": folder}
        job |= {"details": chosen.details, "hardware": chosen.hardware}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.training", "--rank"]
        ranks = [subprocess.Popen([*command, str(r), json.dumps(job)], env=environment) for r in range(RANKS)]
        if any([r.wait() for r in ranks]):
            raise SystemExit("a rank failed; its message is above")
        times: dict[str, Any] = json.loads(Path(folder, "times").read_text())
        return times


def _table(times: Mapping[str, Any]) -> str:
    medians = {name: statistics.median(found["ms"]) for name, found in times.items()}
    base = medians.get(BASE)
    rows = []
    for name, median in medians.items():
        found = times[name]
        ratio = f"{median / base:.2f}" if base else ""
        batch = f"{statistics.median(found['batch']):.1f}" if found["batch"] else ""
        rows.append((name, f"{median:.1f}", f"{min(found['ms']):.1f}", ratio, f"{found['loss']:.5f}", batch))
    return tabulate(rows, headers=("way", "median ms", "least ms", "ratio", "loss", "with fxshard's threads"), disable_numparse=True)


def rank_main(rank: int, job: Mapping[str, Any]) -> None:
    """One rank: prepares all ways, warms them up, then times them in turns; the slowest rank counts."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from bench.training.ours import OURS
    from bench.training.peers import PEERS, Setting
    from fxshard.runtime.groups import gloo_threads

    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # all ways run the same model code
    store = dist.FileStore(f"{job['folder']}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    width, length = map(int, job["size"].split("/"))
    setting = Setting(width, length, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",)), job["hardware"])
    wanted = {n: make for n, make in {**PEERS, **OURS}.items() if not job["only"] or any(o in n for o in job["only"])}
    ways, losses = {}, {}
    for name, make in wanted.items():
        start = time.perf_counter()
        way = ways[name] = make(setting)
        for _ in range(3):
            losses[name] = _mean(way.step())
        if rank == 0:
            print(f"  {name}: ready after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
            if job["details"] and way.detail is not None:
                print(way.detail.plan)
    for way in ways.values():  # warm up once more: preparing a later way may make Dynamo compile an earlier one again
        way.step()
    times: dict[str, dict[str, Any]] = {name: {"ms": [], "batch": [], "loss": losses[name]} for name in ways}
    for _ in range(job["rounds"]):
        for name, way in ways.items():
            if name not in OURS:
                gloo_threads.set_policy(gloo_threads.USUAL)
                times[name]["ms"].append(_timed(way.step))
            gloo_threads.set_policy()
            times[name]["ms" if name in OURS else "batch"].append(_timed(way.step))
    if rank == 0:
        Path(job["folder"], "times").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _mean(loss: Any) -> float:
    """The mean loss over the batch, whether a rank has its own part of it or all of it."""
    import torch.distributed as dist

    value = (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).clone()
    dist.all_reduce(value)
    return float(value) / RANKS


def _timed(step: Any) -> float:
    """The mean milliseconds of two steps on the slower rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    step()
    step()
    took = torch.tensor((time.perf_counter() - start) * 500)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(main())
