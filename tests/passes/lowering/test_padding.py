"""Padding by an amount with symbols: the graph states the strides that torch's kernel gives at every size, also if nothing is added."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.sizes.symbols import SymbolEnv, evaluated
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.local_graph import FAKES, LocalGraph, SymbolicValues
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
