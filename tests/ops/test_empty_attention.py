"""Attention without queries, keys or sequences, for which torch's CPU kernel ends the process: the numbers of torch's own attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxshard


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(("sequences", "queries", "keys"), [(2, 0, 5), (2, 5, 0), (0, 5, 5)])
def test_simulated(sequences: int, queries: int, keys: int) -> None:
    shapes = [(sequences, 2, length, 4) for length in (queries, keys, keys)]
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ran = fxshard.simulate(Attention(), tuple(args), mesh=fxshard.Mesh({"a": 2}))
    want = Attention()(*args)
    want.sum().backward()
    torch.testing.assert_close(ran.outputs, want)
    for i, arg in enumerate(args):
        torch.testing.assert_close(ran.grads[f"args[{i}]"], arg.grad)
