"""Which operators around a cut collective run in pieces: none that would get nothing."""

from __future__ import annotations

import pytest
import torch
from passes.program_differences import differences
from torch import fx, nn

from fxshard.mesh.mesh import Mesh
from fxshard.passes.after_lowering.chunk import Choice, cut_program
from fxshard.passes.after_lowering.cut_candidates import PRODUCT
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram


class FirstRows(nn.Module):
    """Rows are sharded up to the slice, which is read whole: what is gathered is read only in part."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.count, self.a, self.b = count, nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()[: self.count])


def products(program: ShardedProgram) -> list[fx.Node]:
    """Those of the first rank."""
    return [n for n in program.first.graph.nodes if n.target is PRODUCT]


@pytest.mark.parametrize(
    ("given", "read", "in_pieces"),
    [
        (16, 6, True),  # rows 0 to 3, then 4 and 5
        (16, 4, False),  # the second piece has none of the rows that are read
        (5, 5, True),  # of the second rank's 2 rows all are in the first piece, of the first rank's 3 one is in the second
    ],
)
def test_no_product_gets_an_empty_piece(given: int, read: int, in_pieces: bool) -> None:
    """Two ranks send their rows in two pieces, and the product after the gather runs in two pieces if it has rows in both."""
    model, args = FirstRows(read).double(), (torch.randn(given, 6, dtype=torch.float64),)
    graph = trace(model, args)
    pins = {e.node: "R" for e in graph.inputs_of("parameter")} | {"tanh": "S(0)", "slice_1": "R"}
    before = lower(graph, plan_graph(graph, Mesh({"a": 2}), Request(pins=pins, input_layouts="S(0)", output_layouts="R")))
    (gather,) = (k for k, c in enumerate(before.collectives) if c.kind == "all_gather")
    program = cut_program(before, {gather: Choice(0, 2)})
    assert (len(products(program)) > len(products(before))) == in_pieces
    assert all(n.meta["val"].numel() for n in products(program))
    assert differences(program, model, args, {}) < 1e-12
