"""The model, graph and plans that the tests of constraints share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan

L = Layout.parse
MESH, PAIR = Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 2})


class Net(nn.Module):
    """Two inputs, a tied embedding, a split (so that there are getitems), two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value = self.up(self.embed(tokens) * scale).split(16, -1)
        hidden = self.down(F.silu(gate) * value)
        return self.head(hidden), hidden


@lru_cache
def graph(train: bool = True) -> PlanningGraph:
    return trace(Net(), (torch.zeros(4, 6, dtype=torch.int64), torch.ones(4, 6, 8)), train=train)


def planned(mesh: Mesh = MESH, train: bool = True, **request: Any) -> ShardingPlan:
    plan = plan_graph(graph(train), mesh, Request(**request))
    assert 0 <= plan.gap <= 1e-8
    return plan


def getitems() -> list[str]:
    return [n.name for n in graph().nodes if n.name.startswith("getitem")]
