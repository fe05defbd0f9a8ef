"""Attention and MLPs whose projections are packed into one weight, as models on the hub have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """``heads`` query heads of size ``size`` and ``pairs`` key-value heads from one projection; ``take`` takes its result apart."""

    def __init__(self, take: Callable[[torch.Tensor, int, int, int], tuple[torch.Tensor, ...]], heads: int, pairs: int, size: int) -> None:
        super().__init__()
        self.take, self.heads, self.pairs, self.size = take, heads, pairs, size
        self.packed = nn.Linear(heads * size, (heads + 2 * pairs) * size)
        self.out = nn.Linear(heads * size, heads * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (-1, self.size)).transpose(1, 2) for t in self.take(self.packed(x), self.heads, self.pairs, self.size))
        k, v = (t.repeat_interleave(self.heads // self.pairs, 1) for t in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GateUp(nn.Module):
    """down(silu(gate) * up) with gate and up in one weight."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.packed, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.packed(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def split(packed: torch.Tensor, heads: int, pairs: int, size: int) -> tuple[torch.Tensor, ...]:
    """[q | k | v] by ``split``, as GPT-2 does."""
    return packed.split([heads * size, pairs * size, pairs * size], 2)


def slices(packed: torch.Tensor, heads: int, pairs: int, size: int) -> tuple[torch.Tensor, ...]:
    """[q | k | v] by slices, as Phi-3 does."""
    a, b = heads * size, (heads + pairs) * size
    return packed[..., :a], packed[..., a:b], packed[..., b:]


def narrowed(packed: torch.Tensor, heads: int, pairs: int, size: int) -> tuple[torch.Tensor, ...]:
    """[q | k | v] along dim -1, which the graph keeps as it is written."""
    a, b = heads * size, pairs * size
    return packed.narrow(-1, 0, a), packed.narrow(-1, a, b), packed.narrow(-1, a + b, b)


def view(packed: torch.Tensor, heads: int, pairs: int, size: int) -> tuple[torch.Tensor, ...]:
    """[q | k | v] as a dim of 3, as vision transformers do."""
    return tuple(t.flatten(2) for t in packed.unflatten(2, (3, heads, size)).unbind(2))


def by_head(packed: torch.Tensor, heads: int, pairs: int, size: int) -> tuple[torch.Tensor, ...]:
    """[q k v] of each head in turn, as GPT-NeoX does; an ordinary shard has whole heads."""
    return tuple(t.flatten(2) for t in packed.unflatten(2, (heads, 3 * size)).chunk(3, -1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "split": lambda: Attention(split, 4, 4, 2),
    "slices": lambda: Attention(slices, 4, 4, 2),
    "view": lambda: Attention(view, 4, 4, 2),
    "by_head": lambda: Attention(by_head, 4, 4, 2),
    "fewer pairs": lambda: Attention(split, 4, 2, 2),
    "fewer pairs, slices": lambda: Attention(slices, 4, 2, 2),
    "three heads": lambda: Attention(split, 3, 3, 2),
    "three heads, slices": lambda: Attention(slices, 3, 3, 2),
    "gate and up": lambda: GateUp(12, 10),
    "odd gate and up": lambda: GateUp(12, 5),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model of ``MODELS`` in float64, and its input of eight sequences of nine tokens."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, torch.randn(8, 9, next(model.parameters()).shape[1], dtype=torch.float64, requires_grad=True)
