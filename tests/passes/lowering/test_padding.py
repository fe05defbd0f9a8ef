"""Padding by a symbolic amount: the strides in the graph are those of torch's kernel at every size, even if the amount is 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.sizes.symbols import SymbolEnv, evaluated
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.lowering.local_graph import FAKES, NUMBERS, LocalGraph, SymbolicValues
from fxshard.passes.lowering.shaping import pad_to
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.shapes import dynamic_dims, instantiated

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


class Masked(nn.Module):
    """Attention with a bool mask that depends on the argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 4)).transpose(0, 1)[None]
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=(x[:, :1] < x[:, :1].T) | torch.eye(len(x), dtype=torch.bool))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_mask_of_attention_is_padded_as_bytes(size: int) -> None:
    """Queries are sharded, and the shard may have none."""
    model, example = Masked(), (torch.randn(7, 8, dtype=torch.float64),)
    dims = tuple(replace(d, uneven=True) for d in dynamic_dims(model, example, {}, ({0: "n"},)))
    graph = trace(model, example, dynamic=dims, train=False)
    pins = {n.name: "S(2)" for n in graph.nodes if str(n.target) == "fxshard.sdpa.default"}
    pins = {name: (layout, None) for name, layout in pins.items()}
    program = lower_plan(graph, plan_graph(graph, Mesh({"a": 2}), Request(train=False, pins=pins, cache=False)))
    (module,) = program.modules.values()
    padded = [n.args[0].meta["val"].dtype for n in module.graph.nodes if n.target is aten.constant_pad_nd.default]
    assert torch.uint8 in padded and torch.bool not in padded
    args = (torch.randn(size, 8, dtype=torch.float64),)
    at = program_at(program, sizes_of_call(program, args, {}))
    torch.testing.assert_close(simulate_program(at, program_values(at, model, args)).outputs, model(*args), rtol=1e-9, atol=1e-12)
