"""``python -m bench.startup.ahead``: a small Llama compiled ahead of time, on two gloo ranks in new processes.

Prints the seconds to compile it, to load and bind the file and to give the first answer (from a process that has imported fxshard and has
its process group; wall time, and the processor time of that rank), and the time of a step over that of the same program compiled by
Inductor in Python, in rounds that take turns. The slowest rank counts. ``--train``: a training step with AdamW. ``--size 256/128`` sets
width and length, ``--layers`` the number of layers, ``--rounds`` that of rounds, of ``--steps`` steps each.
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
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tabulate import tabulate

WAYS = ("aot_inductor", "inductor")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.startup.ahead", description=__doc__)
    parser.add_argument("--size", default="256/128")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--train", action="store_true")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seconds = export(chosen, folder)
        job = json.dumps({**vars(chosen), "folder": folder})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.startup.ahead", "--rank"]
        ranks = [subprocess.Popen([*command, str(rank), job], env=environment) for rank in range(2)]
        if any([one.wait() for one in ranks]):
            raise SystemExit("a rank failed; its message is above")
        found = [json.loads(Path(folder, f"times.{rank}").read_text()) for rank in range(2)]
    slowest = {name: max(took[name] for took in found) for name in found[0] if name not in WAYS}
    times = {way: [max(pair) for pair in zip(*(took[way] for took in found), strict=True)] for way in WAYS}
    ratios = [a / b for a, b in zip(times["aot_inductor"], times["inductor"], strict=True)]
    rows = [("compile ahead of time, s", f"{seconds:.1f}"), *((name, f"{value:.3f}") for name, value in slowest.items())]
    rows += [(f"step by {way}, ms, median", f"{1e3 * statistics.median(times[way]):.2f}") for way in WAYS]
    rows += [
        ("step over Inductor's, median of rounds", f"{statistics.median(ratios):.3f}"),
        ("of all rounds", f"{min(ratios):.2f} to {max(ratios):.2f}"),
    ]
    print(tabulate(rows, disable_numparse=True))
    return 0


def batch_of(chosen: Any) -> Any:
    import torch

    length = int(chosen["size"].split("/")[1])
    torch.manual_seed(0)
    tokens = torch.randint(0, 1024, (4, length))
    return (tokens, tokens.roll(-1, 1)) if chosen["train"] else (tokens,)


def export(chosen: argparse.Namespace, folder: str) -> float:
    """Writes the program; returns the seconds that compiling it takes."""
    import torch

    import fxshard
    from examples.llama import Llama, LlamaConfig
    from fxshard.runtime.ahead.compile_ahead import compile_ahead

    width, batch = int(chosen.size.split("/")[0]), batch_of(vars(chosen))
    model = Llama(LlamaConfig(vocab=1024, dim=width, layers=chosen.layers, heads=8, kv_heads=4, ffn=3 * width))
    step: dict[str, Any] = {"train": True, "optimizer": torch.optim.AdamW(model.parameters())} if chosen.train else {}
    mesh = fxshard.Mesh({"tp": 2}, hardware="cpu")
    program = fxshard.export(model, batch, mesh, **step)
    start = time.perf_counter()
    compiled = compile_ahead(program, "cpu")
    seconds = time.perf_counter() - start
    replace(program, compiled=compiled).save(f"{folder}/m.pt2")
    return seconds


def rank_main(rank: int, job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import fxshard.api  # noqa: F401  (imported before the time counts)
    from fxshard.runtime.exported import ExportedProgram

    torch.set_num_threads(1)
    batch, took = batch_of(job), dict[str, Any]()
    store = dist.FileStore(f"{job['folder']}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.barrier()
    begun, processor = time.perf_counter(), time.process_time()
    program = ExportedProgram.load(f"{job['folder']}/m.pt2")
    took["load, s"] = time.perf_counter() - begun
    models: dict[str, Any] = {"aot_inductor": program.bind(mesh, compiler="aot_inductor")}
    took["load and bind, s"] = time.perf_counter() - begun
    models["aot_inductor"](*batch)
    took["load, bind and first answer, s"] = time.perf_counter() - begun
    took["the same, processor s of a rank"] = time.process_time() - processor
    models["inductor"] = program.bind(mesh)
    for model in models.values():
        model(*batch)
    took |= {way: [] for way in WAYS}
    for _ in range(job["rounds"]):
        for way, model in models.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(job["steps"]):
                model(*batch)
            took[way].append((time.perf_counter() - begun) / job["steps"])
    Path(job["folder"], f"times.{rank}").write_text(json.dumps(took))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(main())
