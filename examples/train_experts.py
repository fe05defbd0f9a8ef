"""Trains a mixture of experts, whose experts are spread over the ranks, and prints its losses beside one device's.

torchrun --nproc-per-node 2 examples/train_experts.py
torchrun --nproc-per-node 8 examples/train_experts.py --device cuda --experts 64
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fxshard

BATCH, LENGTH = 8, 32


def mixture(experts: int) -> nn.Module:
    """A small Qwen 3 MoE; each token goes to two experts."""
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    routed = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 64}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **routed, bos_token_id=None, eos_token_id=None, use_cache=False))
    model.set_experts_implementation("grouped_mm")  # the loop over experts is no graph
    return model


def batch(step: int, device: str) -> Tensor:
    """[BATCH, LENGTH] tokens that count upwards from a random start."""
    starts = torch.randint(128, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return ((starts + torch.arange(LENGTH)) % 128).to(device)


def train(model: nn.Module, steps: int, device: str, what: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
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
        print(f"{what}: loss {losses[0]:.6f} -> {losses[-1]:.6f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compiler", default="inductor", help="inductor, or eager: starts at once, runs slower")
    options = parser.parse_args()

    mesh = init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))
    one_device = mixture(options.experts).to(options.device)
    tokens = batch(0, options.device)
    how = {"parallel": {"ep": fxshard.ExpertParallel()}, "compiler": options.compiler}
    model = fxshard.parallelize(copy.deepcopy(one_device), (tokens,), mesh, example_kwargs={"labels": tokens}, **how)
    if dist.get_rank() == 0:
        for name, parameter in model.model.layers[0].mlp.named_parameters():
            print(f"model.layers.0.mlp.{name}: {tuple(parameter.shape)}, {parameter.placements}")
    sharded = train(model, options.steps, options.device, f"{mesh.size()} ranks")
    if dist.get_rank() == 0:
        alone = train(one_device, options.steps, options.device, "one device")
        print(f"greatest difference of the losses: {max(abs(a - b) for a, b in zip(sharded, alone, strict=True)):.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
