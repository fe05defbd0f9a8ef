"""Small models for random sessions. Each takes a batch of any size and returns several results, some with gradients of their own.

None has a parameter whose gradient is zero in exact arithmetic (a bias before a batch norm, or of keys): Adam makes steps of its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class Heads(nn.Module):
    """``lone`` is behind one result, ``trunk`` behind all; a batch norm's buffers, an argument that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm = nn.Linear(WIDTH, 12, bias=False), nn.BatchNorm1d(12)
        self.head, self.lone = nn.Linear(12, 6), nn.Linear(12, 6)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        h = self.norm(self.trunk(x)).relu()
        if scale is not None:
            h = h * scale
        return {"head": self.head(h), "lone": self.lone(h.detach()), "sum": h.sum(), "input": x * 2}


class Tied(nn.Module):
    """A decoder layer with one weight for its embedding and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(16, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, targets: Tensor | None = None) -> tuple[Tensor, ...]:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(x)
        if targets is None:
            return logits, x
        return logits, x, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Shared(nn.Module):
    """A layer that is called twice, a counter, a result that is a view of another."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, list[Tensor], Tensor]:
        self.count += 1
        x = self.layer(self.layer(self.first(x)).tanh()) * self.scale
        if keep is not None:
            x = torch.where(keep.unsqueeze(1), x, 0.0)
        y = self.last(x)
        return y, [y.t(), x.mean(0)], y.argmax(-1)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.deep, self.head = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        return {"features": (h, self.deep(h)), "logits": self.head(self.deep(h).mean((2, 3)))}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(x)
        return self.head(out), state


@dataclass(frozen=True)
class Subject:
    """``arguments``: (args, kwargs) for a batch, without options or with them."""

    model: Callable[[], nn.Module]
    arguments: Callable[[int, bool], tuple[tuple[Any, ...], dict[str, Any]]]


def _vectors(batch: int, option: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, WIDTH, dtype=torch.float64),), {"scale": torch.rand(12, dtype=torch.float64)} if option else {}


def _kept(batch: int, option: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(WIDTH, batch, dtype=torch.float64).t()  # not contiguous
    return ((x, torch.rand(batch) > 0.3) if option else (x,)), {}


def _tokens(batch: int, option: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randint(0, 16, (batch, 5)),), {"targets": torch.randint(0, 16, (batch, 5))} if option else {}


def _pictures(batch: int, option: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(batch, 3, 8, 8, dtype=torch.float64)
    return (x.to(memory_format=torch.channels_last) if option else x,), {}


def _sequences(batch: int, option: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, WIDTH, dtype=torch.float64),), {}


SUBJECTS = {
    "heads": Subject(Heads, _vectors),
    "tied": Subject(Tied, _tokens),
    "shared": Subject(Shared, _kept),
    "pictures": Subject(Pictures, _pictures),
    "recurrent": Subject(Recurrent, _sequences),
}
