"""``python -m bench.startup.layers``: the time that many layers take compared with two, in one run, each measurement in its own process.

Measures the seconds from a Llama 3 8B on meta to a lowered program after all passes, on a mesh of 8x8, and the seconds that Inductor takes
to compile the local graphs of one rank of two for small layers (width 64), with empty caches. On a machine with other work, processor time
is more reliable than wall time; that of Inductor includes the C++ compiler. ``--no-compile`` leaves Inductor out, ``--dynamic`` makes batch
and length symbols, ``--runs`` sets the number of runs, of which the fastest counts. fxshard's sources are compiled to bytecode beforehand,
as in an installed package, because passes import some of their modules when they run.
"""

from __future__ import annotations

import argparse
import compileall
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tabulate import tabulate

FEW, MANY = 2, 32
RANKS = 2


@dataclass(frozen=True)
class Took:
    """Seconds of wall time and of processor time; the gap of the plan, if there is one."""

    wall: float
    cpu: float
    gap: float | None = None


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup.layers", description=__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=(FEW, MANY), metavar=("FEW", "MANY"))
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--runs", type=int, default=1)
    chosen = parser.parse_args(arguments)
    for part in ("fxshard", "examples", "bench"):
        compileall.compile_dir(Path(__file__).parents[2] / part, quiet=1)
    rows = [_row("trace, plan, lower", chosen.runs, *((planned, n, chosen.mesh, chosen.dynamic) for n in chosen.layers))]
    if not chosen.no_compile:
        rows.append(_row("compile by Inductor", chosen.runs, *((compiled, n, chosen.dynamic) for n in chosen.layers)))
    few, many = chosen.layers
    print(
        tabulate(
            rows,
            headers=("", f"{few} layers, s", f"{many} layers, s", "times", "processor s", "processor s", "times", "gap"),
            floatfmt=".2f",
        )
    )
    return 0


def _row(name: str, runs: int, *jobs: tuple[Callable[..., Took], ...]) -> tuple[object, ...]:
    few, many = (min((_in_fresh_process(*job) for _ in range(runs)), key=lambda took: took.wall) for job in jobs)
    gap = "" if many.gap is None else f"{max(few.gap or 0.0, many.gap):.4%}"
    return name, few.wall, many.wall, many.wall / few.wall, few.cpu, many.cpu, many.cpu / few.cpu, gap


def _in_fresh_process(job: Callable[..., Took], *given: object) -> Took:
    """Runs in a fresh process with empty caches, so that measurements do not affect each other."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "FXSHARD_CACHE_DIR": folder}
        with mock.patch.dict(os.environ, caches), ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
            return pool.submit(job, *given).result()


def shapes(dynamic: bool) -> Any:
    """Dynamic batch and length of tokens and targets; None if sizes are numbers."""
    import torch

    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    return ({0: batch, 1: seq}, {0: batch, 1: seq}) if dynamic else None


def planned(layers: int, mesh: str, dynamic: bool) -> Took:
    """The time from the model to a program, pass by pass."""
    from bench.planning import measure

    measured = measure.ours("llama", layers, mesh, "h100", None, True, shapes(dynamic))
    return Took(sum(s.wall for s in measured.stages), sum(s.cpu for s in measured.stages), measured.gap)


def compiled(layers: int, dynamic: bool) -> Took:
    """The time that Inductor takes for forward and backward of a rank; torch's ``fake`` process group stands for the other rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import fxshard
    from examples.llama import Llama
    from fxshard.runtime.compile.compile import compile_program
    from fxshard.runtime.rank_graph.bind import bind

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model, tokens = Llama.small(layers=layers), torch.zeros(4, 16, dtype=torch.int64)
    plan = fxshard.plan(model, (tokens, tokens), mesh, dynamic_shapes=shapes(dynamic))
    bound = bind(fxshard.lower(model, (tokens, tokens), plan, dynamic_shapes=shapes(dynamic)), mesh)
    start, before = time.perf_counter(), os.times()
    compile_program(bound)
    wall, after = time.perf_counter() - start, os.times()
    return Took(wall, sum(after[:4]) - sum(before[:4]))


if __name__ == "__main__":
    sys.exit(main())
