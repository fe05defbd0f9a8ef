"""Memory predicted and measured, side by side: ``python -m bench.memory [FAMILY ...] [--mesh tp=2] [--plans 2] [--compiled]``.

Each row is one of ``bench.families`` with the solver's plan or a random one, in training or inference. Columns are the peaks of the plan
before lowering, of the lowered program, of its eager execution (by tracked storages; by the allocator, which includes allocations inside
kernels), and with ``--compiled`` of Inductor's code.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from tabulate import tabulate

from bench.families import make
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.memory import program_memory
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.memory import measure_allocated, measure_memory
from fxshard.testing.random_plan import random_graph_plan

HEADERS = ("family", "plan", "for", "measured", "predicted", "planned", "allocated", "compiled")
DEFAULT = ("perceptron", "convolutions", "llama")


def rows(name: str, mesh_text: str, plans: int, compiled: bool) -> Iterator[tuple[Any, ...]]:
    """The measured bytes (by tracked storages), and the other peaks as ratios to them."""
    model, args, kwargs = make(name, torch.float32)
    mesh = parse_mesh(mesh_text)
    for train in (True, False):
        graph = trace(model, args, kwargs, train=train)
        annotated = annotate(graph, mesh)
        for seed in (None, *range(plans)):
            plan = plan_graph(graph, mesh, Request()) if seed is None else random_graph_plan(annotated, seed)
            program = lower(graph, plan)
            values = program_values(program, model, args, kwargs)
            measured = measure_memory(program, values).peak
            found = [program_memory(program).peak, sum(plan.memory.values())]
            found += [measure_allocated(program, values, compiler=c).peak for c in ("eager", *(["inductor"] if compiled else []))]
            said = "solved" if seed is None else f"random {seed}"
            yield name, said, "training" if train else "inference", measured, *(f"{size / measured:.3f}" for size in found)


def main() -> None:
    parser = argparse.ArgumentParser("bench.memory", description=__doc__)
    parser.add_argument("families", nargs="*", default=DEFAULT, metavar="FAMILY")
    parser.add_argument("--mesh", default="tp=2")
    parser.add_argument("--plans", type=int, default=2, help="random plans for each (default: 2)")
    parser.add_argument("--compiled", action="store_true", help="measure Inductor's code too, which takes minutes")
    options = parser.parse_args()
    table = [row for name in options.families for row in rows(name, options.mesh, options.plans, options.compiled)]
    print(tabulate(table, headers=HEADERS[: len(table[0])], disable_numparse=range(4, len(table[0]))))


if __name__ == "__main__":
    main()
