"""``python -m bench.gpu``: numerics, step times, memory, prices and the cost of dropout on this machine's GPUs, in one JSON file.

A Llama of 4 layers trains on one rank a GPU (at most 8). ``--device cpu --ranks 2`` runs the same checks over gloo, except for the memory,
which only a GPU's allocator tells. Without a GPU and without ``--device cpu`` it says so, writes nothing and exits with 0.

- numerics: the losses of three steps of SGD, which gradients decide from the second on, of each way against one device, as the largest
  relative difference;
- steps: milliseconds, medians of rounds in which all ways take turns, the slowest rank counts; torch's ways and local code written by hand
  beside fxshard's;
- memory: bytes that the allocator held at most in a step over those of the plan;
- prices: microseconds that the plan predicts over those measured;
- dropout: compiled fxshard over compiled torch, one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

MOST_RANKS = 8
SIZES = {"cuda": "1024/1024", "cpu": "64/32"}
"""Width and length."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, at most 8; 2 for the CPU")
    parser.add_argument("--size", metavar="WIDTH/LENGTH", help=f"default: {SIZES['cuda']}, {SIZES['cpu']} for the CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", action="append", default=[], help="a part of a way's name; may be repeated")
    parser.add_argument(
        "--hardware", help="for which fxshard plans: a preset or a file of fxshard calibrate (default: by the device's name)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("-o", "--output", default="gpu.json")
    chosen = parser.parse_args(arguments)
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was checked (--device cpu runs the same checks over gloo)")
        return 0
    ranks = chosen.ranks or (min(MOST_RANKS, torch.cuda.device_count()) if chosen.device == "cuda" else 2)
    found = measured(chosen, ranks)
    Path(chosen.output).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{text(found)}\n\nwrote {chosen.output}")
    return int(any(way["error"] for way in found["ways"].values()))


def measured(chosen: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"device": chosen.device, "ranks": ranks, "size": chosen.size or SIZES[chosen.device], "rounds": chosen.rounds}
        job |= {"dtype": chosen.dtype, "only": chosen.only, "hardware": chosen.hardware, "folder": folder}
        command = [sys.executable, "-m", "bench.gpu.rank", json.dumps(job)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(ranks)]
        if any([process.wait() for process in processes]):
            raise SystemExit("a rank failed; its message is above")
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
        return found


def text(found: dict[str, Any]) -> str:
    """A table of the ways, and the line about dropout."""
    rows = [(name, *(_shown(way[key]) for key in COLUMNS), way["error"]) for name, way in found["ways"].items()]
    about = (
        f"{found['ranks']} x {found['device']}, torch {found['torch']}, {found['dtype']}, width {found['width']}, length {found['length']}"
    )
    table = tabulate(rows, headers=(*("way", *COLUMNS.values()), "error"), disable_numparse=True)
    return f"{about}\n{table}\ndropout, fxshard over torch: {found['dropout']}"


COLUMNS = {
    "numerics": "difference",
    "ms": "median ms",
    "memory_ratio": "memory over plan",
    "price_ratio": "predicted over measured",
}


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
