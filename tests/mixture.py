"""A mixture of experts of fxshard's operators."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)

ops = torch.ops.fxshard


class Mixture(nn.Module):
    """Each token chooses some of the ``experts``; the first is chosen by all, so that ranks have unequal numbers of rows."""

    def __init__(self, experts: int, choices: int) -> None:
        super().__init__()
        self.choices = choices
        torch.manual_seed(0)
        self.router = nn.Linear(8, experts)
        self.up, self.down = nn.Parameter(torch.randn(experts, 8, 64)), nn.Parameter(torch.randn(experts, 32, 8))
        self.register_buffer("favour", torch.eye(experts)[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = (self.router(x).softmax(-1) + self.favour).topk(self.choices, dim=-1)
        experts = len(self.up)
        rows, ids = ops.to_experts(x.unsqueeze(1).expand(-1, self.choices, -1), chosen, experts)
        gate, up = ops.expert_linear(rows, self.up, ids).chunk(2, dim=-1)
        rows = ops.expert_linear(F.silu(gate) * up + 1, self.down, ids)
        return (ops.from_experts(rows, chosen, experts) * weights.unsqueeze(-1)).sum(1)
