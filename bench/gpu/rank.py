"""One rank of ``bench.gpu``: ``python -m bench.gpu.rank JOB RANK``; rank 0 writes ``found.json``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.random import FUNCTIONS, row
from bench.training.by_hand import BY_HAND
from bench.training.checked import difference, disagreement, first_error
from bench.training.model import BATCH
from bench.training.ours import OURS
from bench.training.peers import PEERS, Contestant, Setting
from fxshard.cost.optimizer.optimizer_time import optimizer_time

WAYS: dict[str, Callable[[Setting], Contestant]] = {**PEERS, **BY_HAND, **OURS}


def main(job: Mapping[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # all ways run the same model code
    kind, ranks = job["device"], job["ranks"]
    store = dist.FileStore(f"{job['folder']}/store", ranks)
    given: dict[str, Any] = {}
    if kind == "cuda":
        torch.cuda.set_device(rank)
        given["device_id"] = torch.device("cuda", rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600), **given)
    mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("dp",))
    width, length = map(int, job["size"].split("/"))
    setting = Setting(width, length, mesh, job["hardware"], getattr(torch, job["dtype"]), max(BATCH, ranks))
    found = {name: _prepared(name, make, setting) for name, make in WAYS.items() if _wanted(name, job["only"])}
    _time([one for one in found.values() if one["error"] == ""], job["rounds"], kind)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:  # dropout's cost is one of a process that is alone
        named = {"device": _name(kind), "ranks": ranks, "torch": torch.__version__, "dtype": job["dtype"], "width": width, "length": length}
        ways = {name: {key: value for key, value in one.items() if key != "way"} for name, one in found.items()}
        Path(job["folder"], "found.json").write_text(json.dumps({**named, "ways": ways, "dropout": _dropout(kind)}), encoding="utf-8")


def _wanted(name: str, only: list[str]) -> bool:
    return not only or any(part in name for part in only)


def _name(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else "cpu"


def _prepared(name: str, make: Callable[[Setting], Contestant], setting: Setting) -> dict[str, Any]:
    """A way after its first steps, with its losses beside one device's; ``error`` is the first line of what it raised."""
    found: dict[str, Any] = dict.fromkeys(("numerics", "ms", "least_ms", "memory_ratio", "price_ratio"))
    found |= {"error": "", "way": None, "seconds_to_prepare": None}
    start = time.perf_counter()
    try:
        way = found["way"] = make(setting)
        found["numerics"] = difference(way, setting)
        found["seconds_to_prepare"] = time.perf_counter() - start
        found["memory_ratio"] = _memory_ratio(way, setting)
        found["error"] = disagreement(found["numerics"], setting)
    except Exception as error:  # of any way: reported by name, and the others go on
        lines = str(error).splitlines() or [""]
        found["error"] = f"{type(error).__name__}: {lines[0]}"[:300]
    found["error"] = first_error(found["error"])
    return found


def _memory_ratio(way: Contestant, setting: Setting) -> float | None:
    """Bytes that the allocator held at most during a step, over those of the plan; None on the CPU, and for torch's ways."""
    if setting.mesh.device_type != "cuda" or way.detail is None:
        return None
    others = torch.cuda.memory_allocated() - sum(x.untyped_storage().nbytes() for x in way.held)
    torch.cuda.reset_peak_memory_stats()
    way.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / sum(way.detail.plan.memory.values())


def _time(found: list[dict[str, Any]], rounds: int, kind: str) -> None:
    """Adds the milliseconds of a step to each way; in each round all take turns."""
    times: list[list[float]] = [[] for _ in found]
    for _ in range(rounds):
        for kept, one in zip(times, found, strict=True):
            kept.append(_timed(one["way"].step, kind))
    for kept, one in zip(times, found, strict=True):
        one["ms"], one["least_ms"] = statistics.median(kept), min(kept)
        if one["way"].detail is not None:
            plan = one["way"].detail.plan
            one["price_ratio"] = (plan.objective + optimizer_time(plan, "sgd")) / (one["ms"] * 1e3)


def _timed(step: Callable[[], Any], kind: str) -> float:
    """The mean milliseconds of two steps on the slowest rank."""
    dist.barrier()
    _finish(kind)
    start = time.perf_counter()
    step()
    step()
    _finish(kind)
    took = torch.tensor((time.perf_counter() - start) * 500, device=kind)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _finish(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _dropout(kind: str) -> str:
    """The ratio of a step with dropout, compiled, on one device; on the CPU a smaller one."""
    x = torch.randn(*((2048, 2048) if kind == "cuda" else (64, 64)), device=kind)
    return str(row("dropout", FUNCTIONS["dropout"], x, 15)[3])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
