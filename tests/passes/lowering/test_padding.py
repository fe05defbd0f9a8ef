"""Padding by a symbolic amount: the strides in the graph are those of torch's kernel at every size, even if the amount is 0."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.sizes.symbols import SymbolEnv, evaluated
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.local_graph import FAKES, NUMBERS, LocalGraph, SymbolicValues
from fxshard.passes.lowering.shaping import pad_to
from fxshard.shapes import instantiated

aten = torch.ops.aten


@pytest.mark.parametrize("size", [1, 4, 5, 6])
def test_strides_of_a_padded_transpose(size: int) -> None:
    env = SymbolEnv()
    n = env.symbol("n", hint=5)
    local = LocalGraph(Mesh({"a": 2}), (0,), SymbolicValues(FakeTensorMode(shape_env=env.shape_env)))
    x = local.placeholder("x", (n, 3), torch.empty(0))
    y = pad_to(local, local.emit(aten.t.default, x), (3, 2 * ((n + 1) // 2)))
    local.graph.output((y,))
    values = {n.node.expr: size}
    module = instantiated(local.finish(), {}, lambda expr, _: evaluated(expr, values), FAKES)
    stated = [node.meta["val"] for node in module.graph.nodes if node.op == "call_function"][-1]
    (real,) = fx.Interpreter(module).run(torch.randn(size, 3))
    assert real.shape == stated.shape
    assert real.is_contiguous() and stated.is_contiguous()


def test_inductor_compiles_the_padding_of_bools_that_were_bytes() -> None:
    """The mask of a GPT-2 under a random plan: gathered as bytes, indexed, and padded for the next collective."""
    local = LocalGraph(Mesh({"a": 2}), (0,), NUMBERS)
    x = local.placeholder("x", (40, 32), torch.empty(0, dtype=torch.uint8))
    mask = local.emit(aten._to_copy.default, x, dtype=torch.bool)
    rows = local.emit(aten.unsqueeze.default, local.emit(aten.arange.default, 40, dtype=torch.int64), 1)
    columns = local.emit(aten.arange.default, 32, dtype=torch.int64)
    padded = pad_to(local, local.emit(aten.index.Tensor, mask, [rows, columns]), (41, 32))
    local.graph.output((local.emit(aten.masked_fill.Scalar, local.emit(aten.ones.default, [41, 32]), padded, -1.0),))
    module = local.finish()
    given = torch.randint(0, 2, (40, 32), dtype=torch.uint8)
    want = torch.cat([torch.where(given > 0, -1.0, 1.0), torch.ones(1, 32)])
    torch._dynamo.reset()
    (have,) = torch.compile(module)(given)
    assert torch.equal(have, want)
