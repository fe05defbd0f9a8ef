"""Fine-tunes a vision transformer with LoRA: frozen weights need no gradient, no collective and no optimiser state.

torchrun --nproc-per-node 2 examples/finetune_vit_lora.py
torchrun --nproc-per-node 8 examples/finetune_vit_lora.py --device cuda --rank 16
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm
from transformers import ViTConfig, ViTForImageClassification

import fxshard

IMAGES, CLASSES = 16, 10


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def vit(rank: int) -> nn.Module:
    """A small ViT with LoRA in each layer's attention and MLP; the classifier is trained too. For real weights, use from_pretrained."""
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=CLASSES))
    model.requires_grad_(False)
    for block in [m for m in model.vit.modules() if not isinstance(m, LoRA)]:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRA(layer, rank))
    model.classifier.requires_grad_(True)
    return model


def train(model: nn.Module, steps: int, images: Tensor, labels: Tensor, what: str) -> list[float]:
    """The losses of ``steps`` steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses: list[float] = []
    bar = tqdm(range(steps), desc=what, disable=True if dist.get_rank() else None)  # None: on a terminal only
    for _ in bar:
        loss = F.cross_entropy(model(images).logits, labels)
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
    parser.add_argument("--rank", type=int, default=8, help="the rank of LoRA's matrices")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compiler", default="inductor", help="inductor, or eager: starts at once, runs slower")
    options = parser.parse_args()

    mesh = init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    one_device = vit(options.rank).to(options.device)
    images, labels = torch.randn(IMAGES, 3, 32, 32).to(options.device), torch.randint(CLASSES, (IMAGES,)).to(options.device)
    shard = {"parallel": {"dp": fxshard.FullyShard()}, "compiler": options.compiler}
    model = fxshard.parallelize(copy.deepcopy(one_device), (images,), mesh, **shard)
    if dist.get_rank() == 0:
        trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
        print(f"{trained:,} of {total:,} parameters are trained")
    sharded = train(model, options.steps, images, labels, f"{mesh.size()} ranks")
    if dist.get_rank() == 0:
        alone = train(one_device, options.steps, images, labels, "one device")
        print(f"greatest difference of the losses: {max(abs(a - b) for a, b in zip(sharded, alone, strict=True)):.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
