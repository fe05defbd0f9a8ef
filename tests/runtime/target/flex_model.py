"""Two layers of flex_attention in bfloat16, with one mask of documents and a window, sharded by batch and by queries: what the test of
torch's fused kernel compiles. Run as a script, it prints the report of sm_90 as JSON."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxshard
from fxshard.mesh.mesh import parse_mesh
from fxshard.runtime.target.compile_for import compile_for

WIDTH, LENGTH = 64, 256
PINS = {"flex_attention": ("S(0)S(2)", None, None), "flex_attention_1": ("S(0)S(2)", None, None)}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, blocks: object) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.out(flex_attention(q, k, v, block_mask=blocks).transpose(1, 2).flatten(2))


class Documents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        batch, length = documents.shape

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (documents[b, i] == documents[b, j]) & (i >= j) & (i - j < 100)

        blocks = create_block_mask(seen, batch, None, length, length, device=x.device.type)
        return self.second(self.first(x, blocks), blocks).float().square().mean()


def training() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Documents().bfloat16(), (torch.randn(2, LENGTH, WIDTH, dtype=torch.bfloat16), torch.arange(LENGTH).div(90).long().expand(2, -1))


def main() -> None:
    model, args = training()
    plan = fxshard.plan(model, args, parse_mesh("dp=2,cp=2", "h100"), pins=PINS)
    report = compile_for(fxshard.lower(model, args, plan), "sm_90", (0, 1)).to_json()
    print(json.dumps({"specs": {name: str(spec) for name, spec in plan.specs.items() if "flex" in name}, "report": report}))


if __name__ == "__main__":
    main()
