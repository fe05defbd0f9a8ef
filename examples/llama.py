"""A Llama in plain PyTorch: RoPE, grouped-query attention, SwiGLU, RMSNorm; with targets it returns the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama; the defaults are those of Llama 3 8B."""

    vocab: int = 128256
    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    rope_base: float = 500000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rope_tables(length: int, config: LlamaConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's rotation, both [length, head_dim], in the dtype of ``like``."""
    exponents = torch.arange(0, config.head_dim, 2, device=like.device, dtype=torch.float32) / config.head_dim
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = positions[:, None] * (config.rope_base**-exponents)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of the last dim of x [batch, heads, length, head_dim] by its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def split_heads(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.split_heads(self.wq(x)), cos, sin)
        k = rotate(self.split_heads(self.wk(x)), cos, sin)
        v = self.split_heads(self.wv(x))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.eps)
        self.ffn_norm = RMSNorm(config.dim, config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """``forward(tokens)`` gives logits [batch, length, vocab]; with ``targets`` [batch, length], the mean cross-entropy."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)

    @classmethod
    def small(cls, **changes: Any) -> Llama:
        """Two layers of width 64, trained in seconds on a laptop; ``changes`` are fields of LlamaConfig."""
        sizes = {"vocab": 256, "dim": 64, "layers": 2, "heads": 8, "kv_heads": 4, "ffn": 128, "rope_base": 10000.0}
        return cls(LlamaConfig(**{**sizes, **changes}))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tok_embeddings(tokens)
        cos, sin = rope_tables(tokens.shape[1], self.config, x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        if targets is None:
            return logits
        exact = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return F.cross_entropy(exact.flatten(0, 1), targets.flatten())


def training() -> tuple[Llama, tuple[Tensor, Tensor]]:
    """The small model with tokens and targets: ``fxshard plan examples/llama.py:training --mesh dp=2,tp=2``."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, 129))
    return Llama.small(), (tokens[:, :-1], tokens[:, 1:])
