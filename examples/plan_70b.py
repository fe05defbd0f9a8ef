"""Plans the training of Llama 3 70B on 256 H100s, on a laptop: no GPU, no process group, no weights in memory.

python examples/plan_70b.py
python examples/plan_70b.py --layers 4 --mesh dp=8,tp=8 --memory 40GB -o plan.json
"""

from __future__ import annotations

import argparse
import threading
import time

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import fxshard


def model_and_tokens(layers: int, batch: int) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """Llama 3 70B in bfloat16, and ``batch`` sequences of 4096 tokens, all on meta."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=128256, rope_theta=500000.0, use_cache=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16), torch.empty(batch, 4096, dtype=torch.int64)


def ticking(done: threading.Event) -> None:
    """A bar that counts the seconds, on a terminal."""
    for _ in tqdm(iter(lambda: done.wait(1.0), True), desc="planning", unit=" s", disable=None):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--mesh", default="dp=32,tp=8", help="axes and their sizes; tp is within a node of 8 GPUs")
    parser.add_argument("--memory", default="70GB", help="limit for each GPU")
    parser.add_argument("-o", "--output", help="write the plan here")
    options = parser.parse_args()

    mesh = fxshard.Mesh({axis: int(size) for axis, size in (one.split("=") for one in options.mesh.split(","))}, hardware="h100")
    model, tokens = model_and_tokens(options.layers, batch=256)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.1f} billion parameters, {mesh.size} GPUs: {mesh}", flush=True)
    start, done = time.perf_counter(), threading.Event()
    threading.Thread(target=ticking, args=(done,), daemon=True).start()
    plan = fxshard.plan(
        model,
        (tokens,),
        mesh,
        example_kwargs={"labels": tokens},
        memory_limit=options.memory,  # parameters, gradients, AdamW's state, activations, at the peak
        optimizer="adamw",
    )
    done.set()
    print(f"planned in {time.perf_counter() - start:.1f} s")
    print(
        f"a step takes {plan.objective / 1e6:.2f} s, no plan within the limit less than {plan.lower_bound / 1e6:.2f} s: gap {plan.gap:.2%}"
    )
    print(f"memory: {sum(plan.memory.values()) / 1e9:.1f} GB, {len(plan.recomputed)} blocks recomputed")
    layouts = {name: plan.parameters[name] for name in plan.parameters if name.startswith("model.layers.0.") or ".layers." not in name}
    print(f"layouts on {mesh.axis_names}:", *(f"  {name:45} {layout}" for name, layout in layouts.items()), sep="\n")
    if options.output:
        plan.save(options.output)


if __name__ == "__main__":
    main()
