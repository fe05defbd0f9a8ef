"""The least memory that an error names is that of a plan, and within 2 % of the least of all choices of recomputed blocks."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

from fxshard.errors import ConstraintError
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.memory.saved_for_backward import Modes
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning.choose import Decision, _decision, write_plan
from fxshard.passes.planning.constrain import constraints_of
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.memory import program_memory
from fxshard.runtime.rank_graph.rank_graph import AXIS_INDEX_BYTES

ALONE = Mesh({"a": 1})


class Block(nn.Module):
    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, wide), nn.Linear(wide, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))).sin())


class Model(nn.Module):
    def __init__(self, widths: tuple[int, ...], dim: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(dim, wide) for wide in widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


@pytest.mark.parametrize("widths", [(16, 128), pytest.param((16, 128, 64), marks=pytest.mark.slow)], ids=str)
def test_least_memory_on_one_device_by_enumeration(widths: tuple[int, ...]) -> None:
    """One device has nothing to shard: plans differ only in the blocks that they recompute."""
    graph = trace(Model(widths), (torch.randn(128, 16),))
    annotated = annotate(graph, ALONE)
    formulation = formulate(annotated, constraints_of(graph, ALONE))
    decision, peaks = _decision(graph, formulation, formulation.start), []
    blocks = Modes(graph).blocks
    assert len(blocks) > 1
    for count in range(len(blocks) + 1):
        for some in itertools.combinations(blocks, count):
            again = {block.name: tuple(n.name for n in block.nodes) for block in some}
            plan = write_plan(annotated, Decision(decision.specs, {}, again), formulation.price, formulation.unit, memory_limit=1)
            peaks.append(sum(plan.memory.values()))
            assert program_memory(lower(graph, plan)).peak <= peaks[-1] + AXIS_INDEX_BYTES
    with pytest.raises(ConstraintError) as error:
        plan_graph(graph, ALONE, Request(memory_limit=1))
    found, bound = (
        int(re.search(rf"{said} [^(]*\(([\d,]+) bytes", str(error.value.remedy))[1].replace(",", ""))
        for said in ("least found is", "takes less than")
    )
    assert bound <= min(peaks) <= found
    assert found <= 1.02 * min(peaks), f"{found} of {sorted(peaks)}"
    plan = plan_graph(graph, ALONE, Request(memory_limit=found))
    assert sum(plan.memory.values()) <= found < max(peaks)
