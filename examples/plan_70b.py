"""Plans the training of Llama 3 70B on 256 H100s, on a laptop: no GPU, no process group, no weights in memory.

python examples/plan_70b.py
python examples/plan_70b.py --layers 4 --mesh dp=8,tp=8 --memory 40GB -o plan.json    (with a limit, planning takes about twice as long)
"""

from __future__ import annotations

import argparse
import threading
import time

import torch
from llama import Llama, LlamaConfig
from tqdm import tqdm

import fxshard


def model_and_tokens(layers: int, batch: int) -> tuple[Llama, torch.Tensor]:
    """Llama 3 70B in bfloat16, and ``batch`` sequences of 4096 tokens, all on meta."""
    config = LlamaConfig(dim=8192, layers=layers, heads=64, kv_heads=8, ffn=28672)
    with torch.device("meta"):
        return Llama(config).to(torch.bfloat16), torch.empty(batch, 4096, dtype=torch.int64)


def ticking(done: threading.Event) -> None:
    """A bar that counts the seconds, on a terminal."""
    for _ in tqdm(iter(lambda: done.wait(1.0), True), desc="planning", unit=" s", disable=None):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--mesh", default="dp=32,tp=8", help="axes and their sizes; tp is within a node of 8 GPUs")
    parser.add_argument("--memory", help="limit for each GPU, such as 70GB")
    parser.add_argument("--seconds", type=float, default=60, help="limit for the solver: the gap bounds what that costs")
    parser.add_argument("-o", "--output", help="write the plan here")
    options = parser.parse_args()

    mesh = fxshard.Mesh({axis: int(size) for axis, size in (one.split("=") for one in options.mesh.split(","))}, hardware="h100")
    model, tokens = model_and_tokens(options.layers, batch=mesh.shape[0])
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} billion parameters, {mesh.size} GPUs: {mesh}", flush=True)
    start, done = time.perf_counter(), threading.Event()
    threading.Thread(target=ticking, args=(done,), daemon=True).start()
    # A limit counts parameters, gradients, AdamW's state and activations, at the peak.
    words = {"dp": fxshard.FullyShard(), "tp": fxshard.TensorParallel()}  # the rest is the solver's
    limits = {"memory_limit": options.memory, "optimizer": "adamw", "time_limit": options.seconds}
    plan = fxshard.plan(model, (tokens, tokens), mesh, parallel=words, **limits)
    done.set()
    print(f"planned in {time.perf_counter() - start:.1f} s")
    cost, bound = plan.objective / 1e6, plan.lower_bound / 1e6
    print(f"a step takes {cost:.3f} s; no plan within these words takes less than {bound:.3f} s: gap {plan.gap:.2%}")
    print(fxshard.inspect.summary(plan))
    if options.output:
        plan.save(options.output)


if __name__ == "__main__":
    main()
