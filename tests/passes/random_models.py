"""Small random models: views of views, values read twice or returned, blocks that read earlier values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

SIZE = 8
"""All values are SIZE x SIZE."""

ONE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.sin,
    torch.relu,
    torch.t,
    torch.t,
    lambda a: a.reshape(2, 4, SIZE).transpose(0, 1).reshape(SIZE, SIZE),
    lambda a: torch.cat(a.chunk(2, 1)[::-1], 1),
    lambda a: a[2:3].expand(SIZE, SIZE),
    lambda a: a.sum(0, keepdim=True).expand(SIZE, SIZE),
    lambda a: a.softmax(-1),
    lambda a: F.layer_norm(a, (SIZE,)),
    lambda a: a.topk(SIZE, 1)[0],
    lambda a: a.split([3, 5], 0)[1].sum() * a,
    lambda a: torch.stack(a.unbind(0)[::-1]),
)
TWO: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.mul,
    torch.add,
    torch.matmul,
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a * b[0],
    lambda a, b: torch.cat([a[:4], b[4:]], 0),
)


class Steps(nn.Module):
    """A few operators in a row, each on the newest value and perhaps an earlier one; returns the last result."""

    def __init__(self, rng: random.Random, given: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.steps: list[tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = []
        for have in range(given + 1, given + 1 + count):  # number of values so far, the weight included
            call = rng.choice(ONE if rng.random() < 0.6 else TWO)
            self.steps.append((call, (have - 1, rng.randrange(have))[: 1 if call in ONE else 2]))

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        values = [*given, self.weight]
        for call, places in self.steps:
            values.append(call(*(values[k] for k in places)))
        return values[-1]


class Drawn(nn.Module):
    """Blocks in a row, with operators between them. Each reads the result of the one before and one earlier value."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.before, self.bias = Steps(rng, 2, 3), nn.Parameter(torch.randn(SIZE * SIZE))
        self.layers = nn.ModuleList(Steps(rng, 2, rng.randint(2, 5)) for _ in range(rng.choice([0, 2, 3])))
        self.between = [rng.choice([torch.t, torch.sin, lambda a: a[2:3].expand(SIZE, SIZE), lambda a: a]) for _ in self.layers]
        self.others = [rng.random() for _ in self.layers]
        self.after, self.returned = Steps(rng, 2, 2), [rng.random() for _ in range(rng.randint(0, 2))]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
        values = [x, y, x.t(), self.before(x, y)]
        for layer, change, other in zip(self.layers, self.between, self.others, strict=True):
            values.append(change(layer(values[-1], values[int(other * len(values))])))
        last = self.after(values[-1], values[1]) + self.bias.view(SIZE, SIZE)
        return last, *(values[2 + int(k * (len(values) - 2))] for k in self.returned), (last * values[-1]).sum()


def drawn(seed: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """(model, arguments). For some seeds the first argument requires a gradient."""
    torch.manual_seed(seed)
    x, y = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    return Drawn(seed), (x.requires_grad_(seed % 3 == 0), y)
