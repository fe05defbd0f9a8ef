"""Models written here, of torch's own modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bench.families.family import Case, Family
from examples.llama import Llama


class Perceptron(nn.Module):
    """Two pairs of linear layers with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        pairs = ((nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16)) for _ in range(2))
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Convolutions(nn.Module):
    """Grouped and strided convolutions, batch and group norm, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2, bias=False),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.features(x)), target, label_smoothing=0.1)


def perceptron(dropout: bool) -> Case:
    return Perceptron(0.1 * dropout), (torch.randn(8, 16),), {}


def convolutions(_: bool) -> Case:
    return Convolutions(), (torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))), {}


def small_llama(_: bool) -> Case:
    return Llama.small(), (torch.randint(0, 64, (4, 8)), torch.randint(0, 64, (4, 8))), {}


class Block(nn.Module):
    """A layer as nanoGPT has it: one product for q, k and v, causal attention, a perceptron, norms before each."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(d, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    """Two such layers between tied embeddings, with the loss."""

    def __init__(self, dropout: float, vocabulary: int = 64, dim: int = 16, length: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, 4, dropout) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers that gives each token a class."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True, dropout=dropout)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embed(tokens))[0]).flatten(0, 1), target.flatten())


class Translator(nn.Module):
    """``nn.Transformer`` with a causal mask for its decoder."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))


def nano_gpt(dropout: bool) -> Case:
    return NanoGPT(0.1 * dropout), (torch.randint(0, 64, (4, 8)), torch.randint(0, 64, (4, 8))), {}


def recurrent(dropout: bool) -> Case:
    return Recurrent(0.1 * dropout), (torch.randint(0, 32, (4, 5)), torch.randint(0, 5, (4, 5))), {}


def translator(dropout: bool) -> Case:
    return Translator(0.1 * dropout), (torch.randn(4, 8, 16), torch.randn(4, 6, 16)), {}


_BUILDERS = {"perceptron": perceptron, "convolutions": convolutions, "small llama": small_llama}
_BUILDERS |= {"nanogpt": nano_gpt, "nn.LSTM": recurrent, "nn.Transformer": translator}
FAMILIES = tuple(Family(name, "own", build) for name, build in _BUILDERS.items())
