"""GPT-2 and ViT in plain PyTorch, with separate projections and attention written out, so that ``parallelize_module`` can run them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, VOCABULARY, LABELS, PATCH = 8, 1024, 1024, 16


class Block(nn.Module):
    """Attention and a perceptron on x [batch, length, width], each after a layer norm and added to its input."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal, self.head_dim = causal, width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if self.causal:
            length = x.shape[1]
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class GPT2(nn.Module):
    """The mean cross-entropy of tokens and targets, both [batch, length]. The output matrix is not that of the embedding."""

    def __init__(self, width: int, length: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(Block(width, causal=True) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), targets.flatten())


class ViT(nn.Module):
    """The mean cross-entropy of images [batch, 3, 128, 2 x length] and labels [batch]: patches of 16 x 16; their mean is classified."""

    def __init__(self, width: int, length: int, layers: int) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, width, PATCH, PATCH), nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(Block(width, causal=False) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, LABELS)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(self.norm(x).mean(1)), targets)


def images(length: int, rows: int) -> tuple[Tensor, Tensor]:
    """(images, labels), the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    sides = (8 * PATCH, length // 8 * PATCH)
    return torch.randn(rows, 3, *sides, generator=draw), torch.randint(0, LABELS, (rows,), generator=draw)
