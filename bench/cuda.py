"""Machine code without a GPU: ``python -m bench.cuda [FAMILY ...] [--target sm_90] [--mesh dp=2,tp=2]``.

Each family is planned by the solver and twice at random, in bfloat16 with its backward; one rank's program is compiled by Inductor and
Triton for the target. Prints kernels, launches, calls, collectives, spilling kernels and seconds; exits with 1 if a kernel or a program
does not compile. Each family runs in a process of its own. Needs Triton (``make cuda`` installs it).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from tabulate import tabulate

from bench.families import BY_NAME, make

DEFAULT = ("perceptron", "convolutions", "llama", "gpt2", "bert", "t5", "vit", "nn.LSTM")
HEADERS = ("family", "plan", "kernels", "launches", "calls", "collectives", "spilling", "code bytes", "s", "failures")
PLANS = (None, 0, 1)
"""The solver's plan, and the seeds of random ones."""


def rows(name: str, mesh_text: str, target: str) -> list[tuple[Any, ...]]:
    """A row for each plan of a family."""
    from fxshard.errors import FxshardError
    from fxshard.mesh.mesh import parse_mesh
    from fxshard.passes.annotation.annotate import annotate
    from fxshard.passes.lowering.lower import lower
    from fxshard.passes.pipeline import Request, plan_graph
    from fxshard.passes.trace.trace import trace
    from fxshard.runtime.target.compile_for import compile_for
    from fxshard.testing.random_plan import random_graph_plan

    torch.set_num_threads(1)
    model, args, kwargs = make(name, torch.bfloat16)
    mesh = parse_mesh(mesh_text, "h100")
    graph = trace(model, args, kwargs, train=True)
    annotated = annotate(graph, mesh)
    found: list[tuple[Any, ...]] = []
    for seed in PLANS:
        label, start = "solver" if seed is None else f"random {seed}", time.perf_counter()
        plan = plan_graph(graph, mesh, Request()) if seed is None else random_graph_plan(annotated, seed)
        try:
            report = compile_for(lower(graph, plan), target)
        except FxshardError as error:
            found.append((name, label, *("",) * 6, time.perf_counter() - start, str(error).splitlines()[0]))
            continue
        found.append(
            (name, label, *_counts(report), time.perf_counter() - start, "; ".join(f"{f.kernel}: {f.error}" for f in report.failures))
        )
    return found


def _counts(report: Any) -> Iterator[int]:
    kernels = [kernel for graph in report.graphs for kernel in graph.kernels]
    yield len(kernels)
    yield sum(graph.launches for graph in report.graphs)
    yield sum(count for graph in report.graphs for _, count in graph.calls)
    yield sum(len(graph.collectives) for graph in report.graphs)
    yield sum(kernel.spilled > 0 for kernel in kernels)
    yield sum(kernel.code for kernel in kernels)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cuda", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=DEFAULT)
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--target", default="sm_90")
    chosen = parser.parse_args(arguments)
    for name in chosen.families:
        if name not in BY_NAME:
            parser.error(f"there is no family {name!r}; there are {', '.join(BY_NAME)}")
    table: list[tuple[Any, ...]] = []
    for name in chosen.families:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            table += alone.submit(rows, name, chosen.mesh, chosen.target).result()
        print(tabulate(table[-len(PLANS) :], headers=HEADERS, floatfmt=".0f"), flush=True)
    failed = [row for row in table if row[-1]]
    print(f"\n{len(table) - len(failed)} of {len(table)} programs compile for {chosen.target}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
