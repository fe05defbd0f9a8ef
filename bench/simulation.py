"""``python -m bench.simulation``: the time of the demo's step (forward and backward) simulated on a mesh, relative to an eager step on one
device.

The mesh's ranks share one thread. Medians of steps that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate

from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.demo import batches, corpus, llama
from fxshard.runtime.simulate.reductions import REDUCTIONS
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values

DTYPES = {"float64": torch.float64, "float32": torch.float32}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__)
    parser.add_argument("--mesh", nargs="+", default=["dp=2,tp=4", "dp=2,tp=2"])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--reduction", choices=REDUCTIONS, default="exact")
    parser.add_argument("--steps", type=int, default=7)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for mesh in chosen.mesh:
        for dtype in chosen.dtype:
            alone, simulated = steps(mesh, DTYPES[dtype], chosen.reduction)
            eager, ours = in_turns([alone, simulated], chosen.steps)
            rows.append((mesh, dtype, 1e3 * eager, 1e3 * ours, ours / eager))
    headers = ("mesh", "dtype", "one device ms", "simulated ms", "simulated / one device")
    print(tabulate(rows, headers=headers, floatfmt=("", "", ".0f", ".0f", ".2f")))
    return 0


def steps(mesh: str, dtype: torch.dtype, reduction: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(the eager step on one device, the simulated step with the demo's plan)."""
    model = llama().to(dtype)
    tokens, targets = next(iter(batches(corpus(), 1)))
    graph = trace(model, (tokens, targets))
    axes = parse_mesh(mesh)
    whole = "R" * axes.ndim
    program = lower_plan(graph, plan_graph(graph, axes, Request(input_layouts=whole, output_layouts=whole)))
    values = program_values(program, model, (tokens, targets))

    def alone() -> None:
        model(tokens, targets).backward()
        model.zero_grad()

    return alone, lambda: simulate_program(program, values, reduction)


def in_turns(functions: list[Callable[[], Any]], count: int) -> list[float]:
    """Median seconds of each, after one call for warming up."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(count + 1):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [statistics.median(own[1:]) for own in times]


if __name__ == "__main__":
    sys.exit(main())
