"""``python -m bench.startup.repeats``: a deep model on two gloo ranks, with its repeats compiled once ("once") and each separately ("one by
one"), in one run.

A Llama of ``--layers`` layers: seconds of wall time, and of processor time of both ranks, to compile it with empty caches; milliseconds of
a training step (the two ways take turns; the slower rank counts); the number of kernels that Inductor wrote on both ranks; and the errors
of loss and gradients compared with one device, relative to the largest element of each. ``--tensor`` shards weights as Megatron does
instead of the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

RANKS = 2
TENSOR = {"layers.*.w[qkv13].weight": "S(0)", "layers.*.w[o2].weight": "S(1)"}


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup.repeats", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tensor", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    chosen = parser.parse_args(arguments)
    if chosen.rank is not None:
        rank_main(chosen)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        given = arguments if arguments is not None else sys.argv[1:]
        command = [sys.executable, "-m", "bench.startup.repeats", *given, "--folder", folder, "--rank"]
        ranks = [subprocess.Popen([*command, str(r)], env={**os.environ, "OMP_NUM_THREADS": "1"}) for r in range(RANKS)]
        if any([r.wait() for r in ranks]):
            raise SystemExit("a rank failed; its message is above")
        print(_table(json.loads(Path(folder, "found").read_text())))
    return 0


def _table(found: dict[str, Any]) -> str:
    base = found["one by one"]
    rounds = zip(found["once"]["ms"], base["ms"], strict=True)
    said = f"step, once over one by one, median of the rounds: {statistics.median(a / b for a, b in rounds):.3f}\n"
    rows = [
        (
            name,
            *(f"{x:.1f}" for x in (f["wall"], f["cpu"], statistics.median(f["ms"]), min(f["ms"]))),
            f["kernels"],
            f"{f['loss']:.1e}",
            f"{f['gradients']:.1e}",
        )
        for name, f in found.items()
    ]
    headers = ("repeats compiled", "compile s", "processor s", "step ms", "least ms", "kernels", "loss off by", "gradients off by")
    return said + tabulate(rows, headers=headers, disable_numparse=True)


def rank_main(chosen: Any) -> None:
    """One rank: compiles in both ways, compares each with one device, then times them in turns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{chosen.folder}/store", rank=chosen.rank, world_size=RANKS)
    found, steps = {}, {}
    for name in ("one by one", "once"):
        found[name], steps[name] = _made(name, chosen)
    for _ in range(chosen.rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            took = torch.tensor((time.perf_counter() - start) * 1e3)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found[name]["ms"].append(float(took))
    if chosen.rank == 0:
        Path(chosen.folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def _made(name: str, chosen: Any) -> tuple[dict[str, Any], Any]:
    """Compiles the model in one way; returns the measurements and a function that runs a step."""
    from unittest import mock

    import torch
    import torch.distributed as dist
    from torch._inductor import metrics
    from torch.distributed.device_mesh import init_device_mesh

    import fxshard
    from examples.llama import Llama, LlamaConfig
    from fxshard.runtime.compile import compile, outline

    folder = f"{chosen.folder}/{name.replace(' ', '-')}"
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "FXSHARD_CACHE_DIR": folder}
    compile._ARTEFACTS.clear()
    torch.manual_seed(0)
    width = chosen.width
    heads = max(width // 32, 2)
    config = LlamaConfig(dim=width, layers=chosen.layers, heads=heads, kv_heads=heads // 2, ffn=2 * width, vocab=256)
    model = Llama(config)
    tokens, targets = torch.randint(0, 256, (2, chosen.batch, chosen.length))
    expected = model(tokens, targets)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    with mock.patch.object(outline, "MIN_REPEATS", 10**6 if name == "one by one" else outline.MIN_REPEATS):
        start, before = time.perf_counter(), os.times()
        metrics.reset()
        sharded = fxshard.parallelize(model, (tokens, targets), mesh, **({"pins": TENSOR} if chosen.tensor else {"input_layouts": "S(0)"}))
        loss = sharded(tokens, targets)
        loss.backward()
    wall, after = time.perf_counter() - start, os.times()
    cpu = torch.tensor([sum(after[:4]) - sum(before[:4]), metrics.generated_kernel_count])
    dist.all_reduce(cpu)
    off = max(_off(p.grad.full_tensor(), gradients[n]) for n, p in sharded.named_parameters())
    found = {"wall": wall, "cpu": float(cpu[0]), "kernels": int(cpu[1]), "loss": _off(loss, expected), "gradients": off, "ms": []}

    def step() -> None:
        sharded(tokens, targets).backward()

    for _ in range(3):
        step()
    return found, step


def _off(value: Any, expected: Any) -> float:
    return float((value.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


if __name__ == "__main__":
    sys.exit(main())
