"""Sharded batches with fewer rows than ranks, or with none: some ranks have no rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxshard
from fxshard.mesh.mesh import Mesh
from tests.slices import diagonal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lin, self.norm = nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = (x[:, 0] > 0).long()
        y = self.norm(self.lin(x + self.table(ids)))
        return y, F.cross_entropy(y, ids, reduction="sum")


@pytest.mark.parametrize(("rows", "mesh"), diagonal([0, 1, 2, 3], [Mesh({"a": 4}), Mesh({"a": 2, "b": 2})]))
def test_fewer_rows_than_ranks(rows: int, mesh: Mesh) -> None:
    """Outputs and gradients equal those of one device. The output is returned sharded like the input."""
    torch.manual_seed(rows)
    model, x = Net().double(), torch.randn(rows, 4, dtype=torch.float64)
    cut = "S(0)" * mesh.ndim
    plan = fxshard.plan(model, (x,), mesh, input_layouts=cut, output_layouts=[cut, None], pins={"lin.weight": "R" * mesh.ndim})
    result = fxshard.simulate(model, (x,), plan)
    want = model(x)
    torch.autograd.backward(want, [torch.ones_like(w) for w in want])
    torch.testing.assert_close(result.outputs, tuple(w.detach() for w in want), rtol=1e-12, atol=1e-12)
    assert result.ranks["outputs[0]"][mesh.size - 1].shape == (0, 6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(result.grads[name], p.grad, rtol=1e-10, atol=1e-12)
