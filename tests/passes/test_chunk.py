"""Collectives cut in pieces: every cut leaves numbers and bytes as they are, on any plan; the timeline says which is made."""

from __future__ import annotations

import pytest
import torch
from passes.beside_one_device import differences, traffic
from torch import nn

from fxshard.mesh import parse_mesh
from fxshard.passes.annotate import annotate
from fxshard.passes.around import PRODUCT
from fxshard.passes.chunk import Choice, cut_program
from fxshard.passes.lower import lower
from fxshard.passes.trace import trace
from fxshard.program import ShardedProgram
from fxshard.testing.random_plan import random_graph_plan
from fxshard.verify_program import verify_program


class Network(nn.Module):
    """Products with and without bias, of two and three dims, on rows that are split and merged by views, and a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(i, o, bias=k) for i, o, k in ((6, 8, True), (8, 7, False), (6, 7, False), (7, 5, True)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, rows, 6] -> [batch * rows, 5]."""
        return self.d((self.b(self.a(x).tanh()) + self.c(x)).flatten(0, 1))


def cut_everywhere(program: ShardedProgram, dim: int, count: int) -> tuple[ShardedProgram, int]:
    """Every collective in pieces along that dim of its buffer, and how many were."""
    found = {k: Choice(min(dim, len(c.shape) - 1), count) for k, c in enumerate(program.collectives)}
    made = cut_program(program, found)
    return made, (len(made.collectives) - len(program.collectives)) // (count - 1)


@pytest.mark.parametrize(("mesh", "shape"), [("dp=2", (4, 6)), ("dp=3", (3, 5)), ("dp=2,tp=2", (4, 6)), ("dp=2,tp=2", (5, 7))])
def test_numbers_and_bytes_stay(mesh: str, shape: tuple[int, int]) -> None:
    model, args = Network().double(), (torch.randn(*shape, 6, dtype=torch.float64),)
    graph, cut, piecewise = trace(model, args), 0, 0
    for seed, (dim, count) in enumerate(((0, 2), (1, 2), (2, 3))):
        before = lower(graph, random_graph_plan(annotate(graph, parse_mesh(mesh)), seed, frugal=True))
        program, number = cut_everywhere(before, dim, count)
        verify_program(program)
        assert differences(program, model, args, {}) < 1e-12
        assert traffic(program) == traffic(before)
        assert {p for c in program.collectives for p in c.serves} == {p for c in before.collectives for p in c.serves}
        cut, piecewise = cut + number, piecewise + products(program) - products(before)
    print("CUT", cut, piecewise)


def products(program: ShardedProgram) -> int:
    return sum(n.target is PRODUCT for module in program.modules.values() for n in module.graph.nodes)
