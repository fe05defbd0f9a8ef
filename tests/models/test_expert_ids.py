"""Rows of experts that meet were sent with one ids; another is refused under any plan."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import fxshard
from fxshard.errors import TraceError
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.trace.trace import trace
from tests.mixture import Mixture, ops

MESH = fxshard.Mesh({"dp": 2, "ep": 2})


class Weighted(Mixture):
    """The weights of rows travel too: with the ids that ``second`` makes. ``back`` gives the ids with which rows come back."""

    def second(self, chosen: Tensor) -> Tensor:
        return chosen

    def back(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.choices, dim=-1)
        rows, ids = ops.to_experts(x.unsqueeze(1).expand(-1, self.choices, -1), chosen, len(self.up))
        weight, _ = ops.to_experts(weights.unsqueeze(-1), self.second(chosen), len(self.up))
        rows = ops.expert_linear(rows, self.up[:, :, :32], ids) * weight
        return ops.from_experts(ops.expert_linear(rows, self.down, ids), self.back(chosen, ids), len(self.up)).sum(1)


class Copied(Weighted):
    """Ids that are the same by another name, and computed once more."""

    def second(self, chosen: Tensor) -> Tensor:
        return chosen.clone().view(-1, self.choices)

    def back(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return chosen.int().detach()


class Turned(Weighted):
    def second(self, chosen: Tensor) -> Tensor:
        return chosen.flip(0)


class TurnedBack(Weighted):
    def back(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return chosen.flip(0)


class Returned(Weighted):
    def back(self, chosen: Tensor, ids: Tensor) -> Tensor:
        return ids


@pytest.mark.parametrize("model", [Weighted, Copied])
def test_rows_sent_with_one_ids_meet_on_the_ranks_of_their_experts(model: type[Weighted]) -> None:
    found = annotate(trace(model(4, 2), (torch.rand(8, 8),)), MESH)
    (product,) = [node.name for node in found.graph.nodes if node.name == "mul"]
    assert any(layout.expert_axes for spec in found.specs[product] for layout in spec.outputs)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Turned, "rows of experts that were sent with different ids meet in aten.mul.Tensor\n  where: .*test_expert_ids.py.* \\* weight"),
        (TurnedBack, "sent with different ids meet in fxshard.from_experts.default\n  where: .*test_expert_ids.py"),
        (Returned, "fxshard.from_experts.default has the ids that to_experts returned\n  where: .*\n.*pass the ids given to to_experts"),
    ],
)
def test_others_are_refused_by_the_users_line(model: type[Weighted], said: str) -> None:
    with pytest.raises(TraceError, match=re.compile(said)):
        fxshard.plan(model(4, 2), (torch.rand(8, 8),), MESH, cache=False)
