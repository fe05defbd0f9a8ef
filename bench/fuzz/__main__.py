"""``python -m bench.fuzz``: how many mutated files were refused, accepted, or a fault of their reader."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

from bench.fuzz.run import Tally, run
from bench.fuzz.subjects import SHARES, cases, subjects


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=tuple(SHARES), help="only these files (default: all)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first case, to run one of --kind again")
    given = parser.parse_args()
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    counts = {kind: cases(kind, given.cases) for kind in SHARES} if given.kind is None else {given.kind: given.cases}
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, files in subjects(Path(name)).items():
            if kind in counts:
                tallies[kind] = run(files, counts[kind], given.seed, given.first)
                print(f"{kind}: {tallies[kind].cases} cases, {len(tallies[kind].faults)} faults", flush=True)
                for fault in tallies[kind].faults[:40]:
                    print(f"  {fault}", flush=True)
    rows = [
        (kind, t.cases, t.refused, t.cases - t.refused, len(t.faults), f"{t.slowest:.2f}", f"{t.largest / 2**20:.0f}")
        for kind, t in tallies.items()
    ]
    print(tabulate(rows, ("file", "cases", "refused", "accepted", "faults", "slowest (s)", "most memory (MiB)")))
    return int(any(t.faults for t in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
