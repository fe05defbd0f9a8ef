"""One rank of ``bench.training``: ``python -m bench.training.rank JOB RANK``; rank 0 writes ``found.json``."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.training.checked import difference, disagreement, first_error
from bench.training.families import CannotRun
from bench.training.ours import OURS
from bench.training.peers import PEERS, Contestant, Setting
from fxshard.cost.optimizer.optimizer_time import optimizer_time
from fxshard.runtime.groups import gloo_threads

FEWEST_ROUNDS = 5


def main(job: Mapping[str, Any], rank: int) -> None:
    """Prepares all ways, compares their losses with one device's, then times them in turns; the slowest rank counts."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # all ways run the same model code
    store = dist.FileStore(f"{job['folder']}/store", job["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["ranks"], timeout=timedelta(seconds=900))
    mesh = init_device_mesh("cpu", (job["ranks"],), mesh_dim_names=("dp",))
    width, length = map(int, job["size"].split("/"))
    setting = Setting(width, length, mesh, job["hardware"], name=job["model"], layers=job["layers"])
    wanted = {n: make for n, make in {**PEERS, **OURS}.items() if not job["only"] or any(o in n for o in job["only"])}
    found: dict[str, dict[str, Any]] = {}
    ways: dict[str, Contestant] = {}
    for name, make in wanted.items():
        found[name], way = _prepared(make, setting)
        if way is not None:
            ways[name] = way
        if rank == 0:
            print(f"  {name}: {found[name]['error'] or 'equal'} after {found[name]['seconds']:.1f} s", file=sys.stderr, flush=True)
            if job["details"] and way is not None and way.detail is not None:
                print(way.detail.plan)
    for name, times in _times(ways, job["rounds"], job["seconds"], rank).items():
        found[name] |= times
    if rank == 0:
        Path(job["folder"], "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _prepared(make: Callable[[Setting], Contestant], setting: Setting) -> tuple[dict[str, Any], Contestant | None]:
    """A way whose losses equal one device's, or None and why not."""
    found: dict[str, Any] = {"error": "", "numerics": None, "predicted": None, "ms": [], "batch": []}
    start, way = time.perf_counter(), None
    try:
        way = make(setting)
        found["numerics"] = difference(way, setting)
        found["error"] = disagreement(found["numerics"], setting)
        if way.detail is not None:
            found["predicted"] = (way.detail.plan.objective + optimizer_time(way.detail.plan, "sgd")) / 1e3
    except CannotRun as reason:
        found["error"] = f"not run: {reason}"
    except Exception as error:  # of any way: reported by name, and the others go on
        found["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
    found["error"] = first_error(found["error"])
    found["seconds"] = time.perf_counter() - start
    return found, None if found["error"] else way


def _times(ways: Mapping[str, Contestant], rounds: int, seconds: float, rank: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a step of each way in each round, in an order that changes with the round: "ms" with the threads that each way has
    by itself, "batch" of torch's ways with fxshard's. Fewer rounds where they would take longer than ``seconds``."""
    once = sum(_timed(way.step) for way in ways.values())  # warms up: preparing a later way may make Dynamo compile an earlier one again
    once = sum(_timed(way.step) for way in ways.values())
    rounds = max(FEWEST_ROUNDS, min(rounds, int(1e3 * seconds / max(once, 1e-3) / 4)))
    if rank == 0:
        print(f"  {rounds} rounds of {len(ways)} ways", file=sys.stderr, flush=True)
    times: dict[str, dict[str, list[float]]] = {name: {"ms": [], "batch": []} for name in ways}
    for turn in range(rounds):
        for name in random.Random(turn).sample(sorted(ways), len(ways)):
            if name not in OURS:
                gloo_threads.set_policy(gloo_threads.USUAL)
                times[name]["ms"].append(_timed(ways[name].step))
            gloo_threads.set_policy()
            times[name]["ms" if name in OURS else "batch"].append(_timed(ways[name].step))
    return times


def _timed(step: Callable[[], Any]) -> float:
    """The mean milliseconds of two steps on the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    step()
    took = torch.tensor((time.perf_counter() - start) * 500)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
