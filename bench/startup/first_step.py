"""``python -m bench.startup.first_step``: seconds until a Llama's first training step is done, in new processes.

``torch.compile`` in one process, then ``fxshard.parallelize`` on two gloo ranks, each process with one thread: first with empty caches
(cold), then with the caches that this run filled (warm). The time counts from a process that has imported torch and built the model:
wrapping, planning, compiling, one forward and backward. The time of imports is a separate column. The slowest rank counts. ``processor s``
is the processor time of all ranks and of the compilers that they start, including imports; it depends less on other work on the machine.
fxshard's sources are compiled to bytecode beforehand, as in an installed package.

``--size 256/128`` sets width and length, ``--layers`` the number of layers, ``--rounds`` the number of repetitions (the minimum counts).
``--stages`` lists the time of each pass on each rank, ``--profile FOLDER`` writes a cProfile of each rank there.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import cProfile
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from tabulate import tabulate

RANKS = {"torch.compile": 1, "fxshard": 2}
RUNS = (("torch.compile", "cold"), ("torch.compile", "warm"), ("fxshard", "cold"), ("fxshard", "warm"))
Took = dict[str, float]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.startup.first_step", description=__doc__)
    parser.add_argument("--size", default="256/128")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--profile", default="")
    chosen = parser.parse_args(arguments)
    for part in ("fxshard", "examples", "bench"):
        compileall.compile_dir(Path(__file__).parents[2] / part, quiet=1)
    found: dict[tuple[str, str], list[list[Took]]] = {run: [] for run in RUNS}
    for _ in range(chosen.rounds):
        with tempfile.TemporaryDirectory() as caches:
            for way, state in RUNS:
                found[way, state].append(_measured(way, state, caches, chosen))
                print(f"  {way}, {state}: {max(t['start'] for t in found[way, state][-1]):.1f} s", file=sys.stderr, flush=True)
    print(_table({run: min(rounds, key=_start) for run, rounds in found.items()}))
    if chosen.stages:
        for run in RUNS:
            print(f"\n{', '.join(run)}\n{_stages(min(found[run], key=_start))}")
    return 0


def _start(ranks: list[Took]) -> float:
    return max(took["start"] for took in ranks)


def _table(found: Mapping[tuple[str, str], list[Took]]) -> str:
    seconds = {run: _start(ranks) for run, ranks in found.items()}
    rows = []
    for run, ranks in found.items():
        plain, cold = seconds["torch.compile", run[1]], seconds[run[0], "cold"]
        imports = max(took["import"] for took in ranks)
        processor = sum(took["processor, own"] + took["processor, compilers"] for took in ranks)
        ratios = f"{seconds[run] / plain:.2f}", f"{seconds[run] / cold:.2f}"
        rows.append((*run, f"{imports:.1f}", f"{seconds[run]:.2f}", *ratios, f"{processor:.1f}"))
    headers = ("way", "caches", "import s", "first step s", "over torch.compile", "over cold", "processor s")
    return tabulate(rows, headers=headers, disable_numparse=True)


def _stages(ranks: list[Took]) -> str:
    names = dict.fromkeys(name for took in ranks for name in took)
    rows = [(name, *(f"{took[name]:.2f}" if name in took else "" for took in ranks)) for name in names]
    return tabulate(rows, headers=("stage", *(f"rank {r}, s" for r in range(len(ranks)))), disable_numparse=True)


def _measured(way: str, state: str, caches: str, chosen: Any) -> list[Took]:
    folder = Path(caches, way)
    with tempfile.TemporaryDirectory() as place:
        job = {"way": way, "size": chosen.size, "layers": chosen.layers, "folder": place}
        job["profile"] = chosen.profile and str(Path(chosen.profile).resolve() / f"{way}-{state}")
        folder.mkdir(exist_ok=True)  # TMPDIR: Inductor keeps its compiled C++ headers there, wherever its cache is
        kept = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "FXSHARD_CACHE_DIR": str(folder / "fxshard"), "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "bench.startup.first_step", "--rank"]
        environment = {**os.environ, **kept, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, str(r), json.dumps(job)], env=environment) for r in range(RANKS[way])]
        if any([r.wait() for r in ranks]):
            raise SystemExit("a rank failed; its message is above")
        return [json.loads(Path(place, f"times.{r}").read_text()) for r in range(RANKS[way])]


class _Passes(logging.Handler):
    """Seconds of each pass and step within ``wrap``, from fxshard's log. On the rank that plans, "plan, shared" includes the planning
    passes."""

    def __init__(self, took: Took) -> None:
        super().__init__(logging.DEBUG)
        self.took = took

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "%s: %s (%.1f ms)" and isinstance(record.args, tuple):
            name, _, milliseconds = record.args
            self.took[f"- {name}"] = self.took.get(f"- {name}", 0.0) + float(str(milliseconds)) / 1e3


def rank_main(rank: int, job: Mapping[str, Any]) -> None:
    """One rank: imports, builds the model, and measures the time until its first step is done."""
    took: Took = {}
    with _timed(took, "import"):
        import torch
        import torch.distributed as dist

        if job["way"] == "fxshard":
            import fxshard
        from examples.llama import Llama, LlamaConfig
    torch.set_num_threads(1)
    width, length = map(int, job["size"].split("/"))
    torch.manual_seed(0)
    sizes = {"vocab": 1024, "dim": width, "layers": job["layers"], "heads": 8, "kv_heads": 4, "ffn": 3 * width}
    model: Any = Llama(LlamaConfig(**sizes))
    tokens = torch.randint(0, 1024, (4, length))
    batch = (tokens, tokens.roll(-1, 1))
    profile = cProfile.Profile() if job["profile"] else None
    if job["way"] == "fxshard":
        from torch.distributed.device_mesh import init_device_mesh

        store = dist.FileStore(f"{job['folder']}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        logging.getLogger("fxshard").setLevel(logging.DEBUG)
        logging.getLogger("fxshard").addHandler(_Passes(took))
        dist.barrier()
    with profile or contextlib.nullcontext(), _timed(took, "start"):
        with _timed(took, "wrap"):
            if job["way"] == "fxshard":
                with _timed(took, "- import the rest"):
                    _ = fxshard.parallelize  # its module is imported on first access
            model = fxshard.parallelize(model, batch, mesh) if job["way"] == "fxshard" else torch.compile(model)
        with _timed(took, "first forward"):
            loss = model(*batch)
        with _timed(took, "first backward"):
            loss.backward()
    with _timed(took, "second step"):
        model(*batch).backward()
    took["loss"] = float(loss.detach())
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    took |= {"processor, own": own.ru_utime + own.ru_stime, "processor, compilers": children.ru_utime + children.ru_stime}
    took |= {f"counter {k}": v for k, v in torch._dynamo.utils.counters["inductor"].items() if "cache" in k}
    if profile:
        Path(job["profile"]).mkdir(parents=True, exist_ok=True)
        profile.dump_stats(f"{job['profile']}/{rank}.prof")
    Path(job["folder"], f"times.{rank}").write_text(json.dumps(took))
    if job["way"] == "fxshard":
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def _timed(took: Took, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    took[name] = time.perf_counter() - start


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(main())
