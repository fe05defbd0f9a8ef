"""Models written here: a perceptron, a convolutional network, a small Llama with its loss."""

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


_BUILDERS = {"perceptron": perceptron, "convolutions": convolutions, "small llama": small_llama}
FAMILIES = tuple(Family(name, "own", build) for name, build in _BUILDERS.items())
