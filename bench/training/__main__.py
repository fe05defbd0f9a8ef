"""``python -m bench.training``: milliseconds of a training step on gloo ranks with one thread each; all ways take turns in one run.

The losses of three steps of each way are first compared with one device's. ``ratio`` is the median time over that of the fastest of
torch's ways on several ranks. fxshard makes gloo's network threads batch threads, as always (decision 0033); the others run with gloo's
default threads, and in the last column with batch threads.

``--model`` is llama, gpt2, vit or experts; ``--sizes 256/128,512/256`` sets widths and lengths, ``--layers`` the number of layers,
``--rounds`` how often each way is timed, ``--only`` a part of a way's name (may be repeated), ``--hardware`` the hardware for which
fxshard plans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

Found = Mapping[str, Mapping[str, Any]]
"""For each way what ``bench.training.rank`` found."""

MODELS = ("llama", "gpt2", "vit", "experts")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--sizes", default="256/128,512/256")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0, help="fewer rounds (at least 5) where they would take longer than this")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--hardware", default="cpu", help="hardware of fxshard's plans: a preset, or a file of `fxshard calibrate`")
    parser.add_argument("--details", action="store_true", help="print the plans")
    chosen = parser.parse_args(arguments)
    for size in chosen.sizes.split(","):
        found = measured({**vars(chosen), "size": size})
        print(f"{chosen.model}, width {size.replace('/', ', length ')}, {chosen.ranks} ranks\n{_table(found)}\n", flush=True)
    return 0


def measured(job: Mapping[str, Any]) -> Found:
    """What the ranks found. ``job`` has model, size, ranks, layers, rounds, seconds, only, hardware and details."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({**job, "folder": folder})
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.training.rank", text]
        ranks = [subprocess.Popen([*command, str(r)], env=environment) for r in range(job["ranks"])]
        if any([r.wait() for r in ranks]):
            raise SystemExit("a rank failed; its message is above")
        found: dict[str, dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
        return found


def fastest_peer(found: Found) -> str | None:
    """The name of torch's way on several ranks with the least median, if one ran."""
    medians = {name: statistics.median(one["ms"]) for name, one in found.items() if one["ms"] and _is_peer(name)}
    return min(medians, key=medians.__getitem__, default=None)


def _is_peer(name: str) -> bool:
    return not name.startswith(("fxshard", "one device"))


def _table(found: Found) -> str:
    peer = fastest_peer(found)
    base = statistics.median(found[peer]["ms"]) if peer else None
    rows = []
    for name, one in found.items():
        if one["error"]:
            rows.append((name, *[""] * 5, one["error"]))
            continue
        median = statistics.median(one["ms"])
        ratio = f"{median / base:.2f}" if base else ""
        batch = f"{statistics.median(one['batch']):.1f}" if one["batch"] else ""
        rows.append((name, f"{median:.1f}", f"{min(one['ms']):.1f}", ratio, f"{one['numerics']:.1e}", batch, ""))
    headers = ("way", "median ms", "least ms", "ratio", "loss differs by", "with fxshard's threads", "")
    return tabulate(rows, headers=headers, disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
