"""``python -m bench.redistribution``: bytes that a rank sends from any layout to any other, by fxshard and by torch's own planners.

Bytes follow from the ring formulas at ceil sizes. torch's are those of the transforms that its planners return; an all-to-all counts as
one, although torch runs an all-gather instead on gloo. The first table gives the number of pairs for which fxshard sends less, and for
which it sends more. The second shows the pairs for which the better of torch's planners sends the most relative to fxshard.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence

from tabulate import tabulate

from bench.redistribution.compare import Pair, compare
from fxshard.mesh.mesh import parse_mesh

CASES = (
    ("a=4", (64, 64)),
    ("a=2,b=2", (64,)),
    ("a=2,b=2", (64, 64)),
    ("a=2,b=2", (5, 3)),
    ("a=2,b=3", (66, 66)),
    ("a=2,b=3", (7, 5)),
    ("a=2,b=2,c=2", (64,)),
    ("a=2,b=2,c=2", (64, 64)),
)
SHOWN = ("a=2,b=2", (64, 64))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.redistribution", description=__doc__)
    parser.add_argument("--pairs", type=int, default=600, help="size of the fixed sample of pairs of layouts per case (default: 600)")
    parser.add_argument("--rows", type=int, default=24, help="how many pairs to show (default: 24)")
    options = parser.parse_args()
    rows = []
    for axes, shape in CASES:
        found = compare(parse_mesh(axes), shape, options.pairs)
        rows.append((axes, "x".join(map(str, shape)), len(found), *_summary(found, "greedy"), *_summary(found, "min-cost")))
    counts = ("less", "same", "more", "median ratio where less")
    print(tabulate(rows, headers=("mesh", "shape", "pairs", *(f"{name}: {c}" for name in ("greedy", "min-cost") for c in counts))))
    axes, shape = SHOWN
    print(f"\n{axes}, {'x'.join(map(str, shape))}, shares of the whole tensor\n")
    whole = shape[0] * shape[1] * 4
    worst = sorted((p for p in compare(parse_mesh(axes), shape, None) if p.ratio > 1), key=lambda p: (-p.ratio, str(p.ends)))
    one_each = [next(group) for _, group in itertools.groupby(worst, key=lambda p: (p.ratio, p.ours, p.steps))]
    headers = ("from", "to", "ours", "greedy", "min-cost", "ratio", "our steps")
    print(tabulate([_row(p, whole) for p in one_each[: options.rows]], headers=headers))


def _summary(found: Sequence[Pair], planner: str) -> tuple[int, int, int, str]:
    both = [(p.ours, p.torchs[planner].bytes) for p in found if planner in p.torchs]
    ratios = [theirs / ours for ours, theirs in both if theirs > ours > 0]
    ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
    return sum(t > o for o, t in both), sum(t == o for o, t in both), sum(t < o for o, t in both), ratio


def _row(p: Pair, whole: int) -> tuple[str, ...]:
    theirs = [f"{p.torchs[name].bytes / whole:.3f}" if name in p.torchs else "-" for name in ("greedy", "min-cost")]
    return str(p.ends[0]), str(p.ends[1]), f"{p.ours / whole:.3f}", *theirs, f"{p.ratio:.2f}", p.steps


main()
