"""The time of a question to a plan, relative to the first solve: ``python bench/questions.py [FILE.py:FACTORY] [--mesh ...] [--hardware
...]``.

Processor time of this process. The first solve is that of `fxshard.plan` (messages, and branch and bound, of the whole graph). A question
pins one value to one layout, solves again, makes a plan of the answer and compares it with the first. The values are drawn at random; half
of them are parameters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from tabulate import tabulate

import fxshard
from fxshard.cli.arguments.factory import load_model
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.planning.choose import allowance, solved
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.origin import Origin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="examples/llama3_8b.py:training")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, args, kwargs = load_model(options.model)
    mesh = parse_mesh(options.mesh, options.hardware)
    plan = fxshard.plan(model, args, mesh, kwargs, cache=False)
    first = _first_solve(plan)
    rows, times = [], []
    for name in _names(plan, options.questions, random.Random(options.seed)):
        layouts = [str(c) for c in _layouts(plan, name)]
        layout = random.Random(f"{options.seed} {name}").choice(layouts)
        begin = time.process_time()
        (choice,) = plan.explain(name, layout).choices
        times.append(time.process_time() - begin)
        more = "-" if choice.total is None else f"{choice.total - plan.objective:+,.2f}"
        gap = "-" if choice.gap is None else f"{choice.gap:.5%}"
        rows.append((name, str(plan.layout_of(name)), layout, more, gap, f"{times[-1]:.2f}"))
    headers = ("name", "has", "asked for", f"costs more ({plan.certificate.unit})", "gap", "seconds")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    begin, every = time.process_time(), plan.explain(_names(plan, 2, random.Random(options.seed))[0])
    whole = time.process_time() - begin
    print(f"\n{every}")
    print()
    total = [("first solve", first), ("a question, median", statistics.median(times)), ("a question, longest", max(times))]
    total += [(f"all {len(every.choices)} layouts of {every.name}", whole)]
    print(tabulate([(what, f"{s:.2f}", f"{s / first:.2f}") for what, s in total], headers=("", "seconds", "of the first solve")))


def _first_solve(plan: fxshard.ShardingPlan) -> float:
    """Seconds, without the formulation."""
    origin = plan.origin
    assert isinstance(origin, Origin)
    annotated, constraints = origin.annotated, origin.constraints
    formulation = formulate(annotated, constraints)
    begin = time.process_time()
    solved(annotated, constraints, formulation, allowance(None))
    return time.process_time() - begin


def _names(plan: fxshard.ShardingPlan, count: int, rng: random.Random) -> list[str]:
    parameters = [end.name for end in plan.inputs if end.kind == "parameter"]
    nodes = [n.name for n in plan.nodes if n.op.startswith(("aten", "fxshard")) and len(n.shapes) == 1]
    return rng.sample(parameters, min(len(parameters), count // 2)) + rng.sample(nodes, min(len(nodes), count - count // 2))


def _layouts(plan: fxshard.ShardingPlan, name: str) -> list[fxshard.Layout]:
    """The possible layouts of the value, except its own."""
    assert isinstance(plan.origin, Origin)
    value = plan.origin.value(name)
    return [layout for layout in dict.fromkeys(value.layouts) if layout != plan.layout_of(name)] or [plan.layout_of(name)]


if __name__ == "__main__":
    main()
