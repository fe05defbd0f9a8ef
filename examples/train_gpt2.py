"""Trains GPT-2 on several processes or GPUs, then once more on one device, and prints both losses.

torchrun --nproc-per-node 2 examples/train_gpt2.py
torchrun --nproc-per-node 8 examples/train_gpt2.py --device cuda --parallel fsdp --layers 12
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import fxshard

BATCH, LENGTH = 8, 64
WORDS = {"auto": "auto", "ddp": fxshard.DataParallel(), "fsdp": fxshard.FullyShard(), "tp": fxshard.TensorParallel()}


def gpt2(layers: int) -> nn.Module:
    """A GPT-2 that reads bytes; without dropout, so that plain PyTorch on one device computes the same."""
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_head": 4, "n_layer": layers}
    others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **others, loss_type="ForCausalLM", use_cache=False))


def batch(step: int, device: str) -> Tensor:
    """[BATCH, LENGTH] bytes of torch's own source. All ranks draw the same: a plain tensor is the global batch."""
    text = torch.tensor(list(Path(torch.__file__).read_bytes()))
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(LENGTH)].to(device)


def train(model: nn.Module, steps: int, device: str, what: str) -> list[float]:
    """An ordinary training loop; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, start = [], time.perf_counter()
    bar = tqdm(range(steps), desc=what, disable=True if dist.get_rank() else None)  # None: on a terminal only
    for step in bar:
        tokens = batch(step, device)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
    if dist.get_rank() == 0:
        speed = steps * BATCH * LENGTH / (time.perf_counter() - start)
        print(f"{what}: loss {losses[0]:.6f} -> {losses[-1]:.6f}, {speed:,.0f} tokens/s", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--parallel", choices=WORDS, default="fsdp", help="auto: the solver chooses everything")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compiler", default="inductor", help="inductor, or eager: starts at once, runs slower")
    options = parser.parse_args()

    mesh = init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    one_device = gpt2(options.layers).to(options.device)
    tokens = batch(0, options.device)
    start = time.perf_counter()
    how = {"parallel": {"dp": WORDS[options.parallel]}, "compiler": options.compiler}
    model = fxshard.parallelize(copy.deepcopy(one_device), (tokens,), mesh, example_kwargs={"labels": tokens}, **how)
    plan = model.forward.programs[0].plan
    if dist.get_rank() == 0:
        took = time.perf_counter() - start
        print(f"planned and compiled in {took:.1f} s: {len(plan.collectives)} collectives a step, gap {plan.gap:.1%}")
    sharded = train(model, options.steps, options.device, f"{mesh.size()} ranks")
    if dist.get_rank() == 0:
        alone = train(one_device, options.steps, options.device, "one device")
        print(f"greatest difference of the losses: {max(abs(a - b) for a, b in zip(sharded, alone, strict=True)):.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
