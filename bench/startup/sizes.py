"""``python -m bench.startup.sizes``: the cost of a new sequence length, and of symbolic sizes in a steady step.

A two-layer Llama trains on two gloo ranks with one thread each, through Inductor. Prints the time of the first step at each of several new
lengths relative to a later step at the same length (medians), and the time of a steady step of the program for any length relative to that
of a program for this length alone, which take turns. ``--width`` (default 256), ``--rounds``.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from examples.llama import Llama, LlamaConfig

RANKS, BATCH, STEADY = 2, 4, 128
LENGTHS = tuple(64 + 37 * i % 56 for i in range(24))
"""Each is met for the first time once, in a step of 25 to 50 ms; the median of eight of them varied by a tenth between runs."""


def llama(width: int) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab=1024, dim=width, layers=2, heads=8, kv_heads=4, ffn=2 * width))


def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(length)
    return torch.randint(0, 1024, (BATCH, length), generator=draw), torch.randint(0, 1024, (BATCH, length), generator=draw)


def seconds(model: Any, args: tuple[torch.Tensor, ...]) -> float:
    """The seconds of one training step without an optimiser, on both ranks at once."""
    dist.barrier()
    start = time.perf_counter()
    model(*args).backward()
    took = time.perf_counter() - start
    model.zero_grad()
    return took


def rank(index: int, folder: str, width: int, rounds: int) -> None:
    torch.set_num_threads(1)
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=index, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    anyone = fxshard.parallelize(llama(width), batch(STEADY), mesh)
    seconds(anyone, batch(STEADY))
    second = seconds(anyone, batch(120))
    new = [seconds(anyone, batch(length)) for length in LENGTHS]
    known = [statistics.median(seconds(anyone, batch(length)) for _ in range(rounds)) for length in LENGTHS]
    made = len(anyone.forward.programs)
    one = fxshard.parallelize(llama(width), batch(120), mesh, dynamic=False)
    for _ in range(3):
        seconds(one, batch(120)), seconds(anyone, batch(120))
    pairs = [(seconds(one, batch(120)), seconds(anyone, batch(120))) for _ in range(4 * rounds)]
    if index == 0:
        ratios = [a / b for a, b in zip(new, known, strict=True)]
        print(f"the second length: {second:.1f} s, compiled; programs in all: {made}")
        print(f"third and later new lengths over known ones: median {statistics.median(ratios):.2f}, at most {max(ratios):.2f}")
        print("  " + ", ".join(f"{n}: {1e3 * a:.1f} / {1e3 * b:.1f} ms" for n, a, b in zip(LENGTHS, new, known, strict=True)))
        static, dynamic = (statistics.median(times) for times in zip(*pairs, strict=True))
        of_rounds = statistics.median(d / s for s, d in pairs)
        both = f"{1e3 * dynamic:.1f} / {1e3 * static:.1f} ms; by rounds {of_rounds:.3f}"
        print(f"steady, any length over made for it: {dynamic / static:.3f} ({both})")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder, given.width, given.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
