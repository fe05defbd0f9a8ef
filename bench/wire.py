"""``python -m bench.wire``: bytes that gloo ranks send over the loopback device in a step, relative to the bytes that the plan predicts.

Each collective alone, then steps of a small Llama in several layouts, on two ranks or on ``--ranks``. The kernel counts the bytes
(``/proc/net/dev``, Linux), TCP headers included, so nothing else may use the loopback device meanwhile. The minimum of several rounds
counts, less that of a barrier. The prediction is that of ring algorithms (docs/hardware.md). gloo's own reduce-scatter reduces the whole
tensor on every rank and sends as much as an all-reduce; its row is for comparison, because programs do not use it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROUNDS, STEPS = 5, 10
FLOATS = 1 << 18
"""Elements of the buffer of a single collective: 1 MiB of float32."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.wire", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hardware", default="cpu", help="what the Llama is planned for: a preset, or a file of `fxshard calibrate`")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.rank is not None:
        rank_main(chosen.rank, chosen.ranks, chosen.store, chosen.hardware)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.wire", "--ranks", str(chosen.ranks), "--hardware", chosen.hardware]
        command += ["--store", str(Path(folder, "store"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, "--rank", str(r)], env=environment) for r in range(chosen.ranks)]
        return max([abs(r.wait()) for r in ranks])


def rank_main(rank: int, ranks: int, store: str, hardware: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    rows = []
    for name, step, predicted in (*_collectives(mesh), *_models(mesh, hardware)):
        step()
        sent = min(_counted(step) for _ in range(ROUNDS)) / ranks / STEPS
        rows.append((name, f"{sent:,.0f}", f"{predicted:,}", f"{sent / predicted:.3f}"))
    if rank == 0:
        print(tabulate(rows, headers=("what", "bytes sent by a rank", "predicted", "ratio"), disable_numparse=True))
    dist.barrier()
    dist.destroy_process_group()


def _counted(step: Callable[[], Any]) -> int:
    """Bytes sent over the loopback device in ``STEPS`` steps of all ranks, without those of the two barriers around them."""
    import torch.distributed as dist

    dist.barrier()
    before = _loopback()
    dist.barrier()
    barrier = _loopback() - before
    before = _loopback()
    for _ in range(STEPS):
        step()
    dist.barrier()
    return _loopback() - before - barrier


def _loopback() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise SystemExit("/proc/net/dev has no loopback device: this bench needs Linux")


def _collectives(mesh: Any) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """(name, call, predicted bytes) of each kind of collective, with the calls that programs make."""
    import torch

    from fxshard.runtime.groups.reduce_scatter import reduce_scatter

    c10d, n, group = torch.ops._c10d_functional, mesh.size(), mesh.get_group().group_name
    buffer, wait = torch.ones(n, FLOATS // n), c10d.wait_tensor
    size = buffer.numel() * 4
    calls = {
        "all_reduce": (lambda: wait(c10d.all_reduce(buffer, "sum", group)), 2 * (n - 1) * size // n),
        "all_gather": (lambda: wait(c10d.all_gather_into_tensor(buffer[:1], n, group)), (n - 1) * size // n),
        "reduce_scatter": (lambda: reduce_scatter(buffer, "sum", n, group, "gloo"), (n - 1) * size // n),
        "reduce_scatter, gloo's own": (lambda: wait(c10d.reduce_scatter_tensor(buffer, "sum", n, group)), (n - 1) * size // n),
        "all_to_all": (lambda: wait(c10d.all_to_all_single(buffer, [1] * n, [1] * n, group)), (n - 1) * size // n),
    }
    for name, (call, predicted) in calls.items():
        yield name, call, predicted


def _models(mesh: Any, hardware: str) -> Iterator[tuple[str, Callable[[], Any], int]]:
    from bench.training.ours import OURS
    from bench.training.peers import Setting

    for name, make in OURS.items():
        way = make(Setting(128, 64, mesh, hardware))
        yield name, way.step, sum(c.bytes for c in way.detail.plan.collectives)


if __name__ == "__main__":
    sys.exit(main())
