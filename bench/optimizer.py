"""``python -m bench.optimizer``: the time of an optimiser's step on a parallelized model, relative to the same step on plain tensors of the
shards' sizes.

A Llama of four layers in Megatron's layouts, on rank 0 of two. torch's fake process group stands for the other rank, so there is no
communication. Medians of steps that take turns, in varying order.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fxshard.layout.layouts import Layout
from fxshard.runtime.demo import llama
from fxshard.runtime.module.parameters import shard_parameters

COLUMNS = ("wq", "wk", "wv", "w1", "w3", "tok_embeddings", "output")
ROWS = ("wo", "w2")
KINDS = {"adam": optim.Adam, "adamw": optim.AdamW, "sgd": optim.SGD}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.optimizer", description=__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--optimizer", choices=KINDS, default="adam")
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2)
    rows = [(width, *measured(width, KINDS[chosen.optimizer], chosen.steps)) for width in chosen.width]
    headers = ("width", "parallelized ms", "plain shards ms", "DTensor's own ms", "parallelized / plain", "DTensor / plain")
    print(tabulate(rows, headers=headers, floatfmt=("", ".2f", ".2f", ".2f", ".2f", ".2f")))
    dist.destroy_process_group()
    return 0


def measured(width: int, kind: type[optim.Optimizer], steps: int) -> tuple[float, ...]:
    """Milliseconds of a step on the parallelized model, on plain shards, and on DTensors that ``parallelize`` did not make; the ratios of
    the first and third to the second."""
    ours = parallelized(width)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in ours]
    optimizers = [kind(p, lr=1e-3, foreach=True) for p in (ours, plain, theirs)]  # type: ignore[call-arg]  # all of KINDS take these
    for p, q, r in zip(ours, plain, theirs, strict=True):
        q.grad = torch.randn_like(q)
        p.grad, r.grad = (DTensor.from_local(q.grad, p.device_mesh, p.placements, run_check=False) for _ in range(2))
    times: list[list[float]] = [[], [], []]
    orders = itertools.cycle(itertools.permutations(range(3)))
    for _, order in zip(range(steps + 6), orders, strict=False):
        for k in order:
            start = time.perf_counter()
            optimizers[k].step()
            times[k].append(1e3 * (time.perf_counter() - start))
    mine, base, other = (statistics.median(t[6:]) for t in times)
    return mine, base, other, mine / base, other / base


def parallelized(width: int) -> list[nn.Parameter]:
    """Parameters as ``parallelize`` leaves them, for rank 0 of two."""
    model = llama(dim=width, ffn=3 * width, layers=4)
    layouts = {}
    for name, _ in model.named_parameters():
        owner = name.split(".")[-2]
        layouts[name] = Layout.parse("S(0)" if owner in COLUMNS else "S(1)" if owner in ROWS else "R")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shard_parameters(model, layouts, mesh, torch.device("cpu"))
    return list(model.parameters())


if __name__ == "__main__":
    sys.exit(main())
