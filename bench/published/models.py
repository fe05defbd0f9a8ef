"""The models of the published steps, on meta tensors: Llama 3 (that of ``examples``) and MPT (llm-foundry's sizes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class MPTConfig:
    """An MPT: pre-norm, no biases, a GELU feed-forward of four widths, a head that shares the embedding's table."""

    dim: int
    heads: int
    layers: int
    vocab: int = 50368


class MPTBlock(nn.Module):
    def __init__(self, c: MPTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm_1 = nn.LayerNorm(c.dim, bias=False)
        self.norm_2 = nn.LayerNorm(c.dim, bias=False)
        self.qkv = nn.Linear(c.dim, 3 * c.dim, bias=False)
        self.out = nn.Linear(c.dim, c.dim, bias=False)
        self.up = nn.Linear(c.dim, 4 * c.dim, bias=False)
        self.down = nn.Linear(4 * c.dim, c.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    def __init__(self, c: MPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(MPTBlock(c) for _ in range(c.layers))
        self.norm_f = nn.LayerNorm(c.dim, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm_f(x), self.wte.weight).float().flatten(0, 1), targets.flatten())


def _llama(layers: int) -> nn.Module:
    return Llama(LlamaConfig(layers=layers))


def _mpt(dim: int, heads: int) -> Callable[[int], nn.Module]:
    return lambda layers: MPT(MPTConfig(dim, heads, layers))


@dataclass(frozen=True)
class Model:
    """``build(layers)``; ``layers``: of the published model; ``reduces``: the dtype in which its runs reduce gradients."""

    build: Callable[[int], nn.Module]
    layers: int
    reduces: torch.dtype


# torchtitan and autoparallel reduce in float32, llm-foundry (FSDP's mixed precision PURE) in bfloat16.
MODELS = {
    "llama3.1-8b": Model(_llama, 32, torch.float32),
    "llama3-8b": Model(_llama, 32, torch.float32),
    "mpt-1b": Model(_mpt(2048, 16), 24, torch.bfloat16),
    "mpt-7b": Model(_mpt(4096, 32), 32, torch.bfloat16),
    "mpt-13b": Model(_mpt(5120, 40), 40, torch.bfloat16),
}


def built(name: str, layers: int) -> nn.Module:
    """The model in float32, the dtype of the optimiser's weights, with ``layers`` layers, on meta."""
    with torch.device("meta"):
        return MODELS[name].build(layers)
