"""Mixtures whose experts take a fixed number of tokens of each group, as users write them (GShard, Switch, DeepSpeed)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HIDDEN = 8, 12


class Experts(nn.Module):
    """x [e, n, m] -> [e, n, m], by one matrix up and one down for each expert."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(experts, width, hidden)), nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.up)), self.down)


class CapacityBound(nn.Module):
    """x [g, s, m]: each token goes to the expert of its choice, or, if ``capacity`` of its group came first, none."""

    def __init__(self, experts: int, capacity: int, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts, self.capacity = nn.Linear(width, experts), Experts(experts, width, hidden), capacity

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate, expert, place) of each token; the place of a dropped token is ``capacity``."""
        gate, expert = self.router(x).softmax(-1).max(-1)
        mask = F.one_hot(expert, self.router.out_features)
        place = ((mask.cumsum(-2) - 1) * mask).sum(-1)
        return gate * (place < self.capacity), expert, place.clamp(max=self.capacity)


class ByEinsum(CapacityBound):
    """A dispatch mask [g, s, e, c] of zeros and ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, expert, place = self.route(x)
        slots = F.one_hot(place, self.capacity + 1)[..., :-1].to(x.dtype)
        dispatch = F.one_hot(expert, self.router.out_features).to(x.dtype).unsqueeze(-1) * slots.unsqueeze(-2)
        sent = torch.einsum("gsec,gsm->egcm", dispatch, x)
        back = self.experts(sent.flatten(1, 2)).view(sent.shape)
        return torch.einsum("gsec,egcm->gsm", gate[..., None, None] * dispatch, back)


class ByScatter(CapacityBound):
    """Places are computed for each group, and tokens added into a buffer [g, e c + 1, m], whose last row takes the dropped ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, expert, place = self.route(x)
        (g, _, m), e, c = x.shape, self.router.out_features, self.capacity
        row = (expert * c + place).where(place < c, e * c).unsqueeze(-1).expand(x.shape)
        sent = x.new_zeros(g, e * c + 1, m).scatter_add(1, row, x)[:, :-1]
        back = self.experts(sent.view(g, e, c, m).transpose(0, 1).reshape(e, g * c, m))
        back = F.pad(back.view(e, g, c, m).transpose(0, 1).reshape(g, e * c, m), (0, 0, 0, 1))
        return back.gather(1, row) * gate.unsqueeze(-1)


class ByIndex(CapacityBound):
    """All tokens are one group, added into a buffer [e c + 1, m] by ``index_add``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        gate, expert, place = self.route(tokens)
        e, c = self.router.out_features, self.capacity
        row = (expert * c + place).where(place < c, e * c)
        sent = x.new_zeros(e * c + 1, x.shape[-1]).index_add(0, row, tokens)[:-1]
        back = self.experts(sent.view(e, c, -1)).flatten(0, 1)
        back = torch.cat([back, back.new_zeros(1, x.shape[-1])])
        return (back[row] * gate.unsqueeze(-1)).view(x.shape)
