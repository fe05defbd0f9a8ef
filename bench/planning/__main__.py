"""``python -m bench.planning``: seconds from a model to a plan by stage, compared with a trace by torch alone ("bare"), and the plan's gap
and memory.

Every measurement runs in a separate process. Importing torch and building the model on meta are not counted. ``--growth`` also plans a
model with twice the layers; ``--lower`` also lowers the plan and runs the passes after lowering. On a machine with other work, processor
time is more reliable than wall time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from bench.fresh_process import in_fresh_process
from bench.planning import child

if TYPE_CHECKING:
    from bench.planning.measure import Measured

LAYERS = {"llama": 32, "t5": 12, "moe": 24, "moe128": 24}


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=__doc__)
    parser.add_argument("--model", choices=LAYERS, default="llama")
    parser.add_argument("--layers", type=int, help="default: 32, T5 12 and 12, mixtures of experts 24")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--parallel", metavar="WORDS", help="words of the axes, such as dp=ep,ep=ep for experts on both")
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--time-limit", type=float, help="seconds for the solver; default: its own limit on work")
    parser.add_argument("--growth", action="store_true", help="also plan a model with twice the layers")
    parser.add_argument("--lower", action="store_true", help="also lower the plan, pass by pass")
    parser.add_argument("--no-bare", action="store_true", help="leave out the traces by torch alone")
    parser.add_argument("--runs", type=int, default=1, help="repeat each measurement this many times, and take the fastest")
    chosen = parser.parse_args(arguments)
    layers = chosen.layers or LAYERS[chosen.model]

    def ours(count: int) -> Measured:
        given = chosen.model, count, chosen.mesh, chosen.hardware, chosen.time_limit, chosen.lower, chosen.parallel
        return _fastest(chosen.runs, child.ours, *given)

    traces = [] if chosen.no_bare else [_fastest(chosen.runs, child.bare, kind, chosen.model, layers) for kind in child.KINDS]
    planned = ours(layers)
    said = f", {chosen.parallel}" if chosen.parallel else ""
    print(f"{chosen.model}, {layers} layers, mesh {chosen.mesh}{said}, {chosen.hardware}\n")
    for trace in traces:
        print(_table(trace, "torch's bare trace"))
    print(_table(planned, "fxshard"))
    print(f"gap {planned.gap:.4%}, plan {planned.hash[:12]}")
    for trace in traces:
        over, cpu = _total(planned) - _total(trace), _processor(planned) - _processor(trace)
        print(f"{over:+.1f} s on the clock, {cpu:+.1f} s of the processor over the bare trace by {trace.stages[-1].name}")
    if chosen.growth:
        print()
        print(_growth(planned, ours(2 * layers), layers))
    return 0


def _fastest(runs: int, job: Callable[..., Measured], *given: Any) -> Measured:
    return min((in_fresh_process(job, *given) for _ in range(runs)), key=_total)


def _total(measured: Measured) -> float:
    return sum(s.wall for s in measured.stages)


def _processor(measured: Measured) -> float:
    return sum(s.cpu for s in measured.stages)


def _table(measured: Measured, heading: str) -> str:
    rows = [(s.name, s.wall, s.cpu, s.memory / 1e9, s.made) for s in measured.stages]
    total = ("total", _total(measured), _processor(measured), max(s.memory for s in measured.stages) / 1e9)
    return tabulate([*rows, total], headers=(heading, "s", "processor s", "peak GB", "made"), floatfmt=".2f") + "\n"


def _growth(one: Measured, two: Measured, layers: int) -> str:
    pairs = list(zip(one.stages, two.stages, strict=True))
    rows = [(a.name, a.cpu, b.cpu, b.cpu / a.cpu if a.cpu else 0.0) for a, b in pairs]
    after = [sum(s.cpu for s in measured.stages[1:]) for measured in (one, two)]
    rows.append(("after the trace", *after, after[1] / after[0]))
    return tabulate(rows, headers=("processor s", f"{layers} layers", f"{2 * layers} layers", "times"), floatfmt=".2f")


if __name__ == "__main__":
    sys.exit(main())
