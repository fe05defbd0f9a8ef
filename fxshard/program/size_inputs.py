"""Dynamic sizes of a bound program: inputs of its graph, from which nodes compute the sizes in its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from fxshard._torch_compat import pytree
from fxshard._torch_compat.inductor.expression_calls import expression_as_calls
from fxshard._torch_compat.sizes.symbols import expression, hint_of, is_symbolic
from fxshard.errors import SizesError
from fxshard.program.sharded_program import ProgramSize

SIZE_INPUT = "size_"


def add_size_inputs(module: fx.GraphModule, sizes: Sequence[ProgramSize]) -> None:
    """Adds an input to the graph for each of ``sizes`` after the others, in place, and nodes that compute the sizes in its calls."""
    if not sizes:
        return
    graph, tracer = module.graph, GraphAppendingTracer(module.graph)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    symbols: dict[sympy.Symbol, fx.Proxy] = {}
    for one in sizes:
        with graph.inserting_before(first):
            node = graph.placeholder(SIZE_INPUT + one.name)
        node.meta["val"] = one.value
        symbols[expression(one.value)] = fx.Proxy(node, tracer)
    computed: dict[sympy.Basic, fx.Node] = {}

    def number(value: Any) -> Any:
        if not is_symbolic(value):
            return value
        expr = expression(value)
        if not expr.free_symbols:
            return hint_of(value)
        if expr not in computed:
            with graph.inserting_before(first):
                computed[expr] = _computed(expr, symbols)
            computed[expr].meta["val"] = value
        return computed[expr]

    for node in list(graph.nodes):
        if node.op in ("call_function", "output"):
            node.args, node.kwargs = pytree.tree_map(number, (node.args, dict(node.kwargs)))
    graph.lint()
    module.recompile()


def sizes_as_tensors(module: fx.GraphModule, count: int, device: torch.device) -> None:
    """Makes tensors of the last ``count`` inputs, which are sizes, in place: a size of 5 becomes a tensor of shape [5, 0] on ``device``."""
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    first = next(n for n in module.graph.nodes if n.op != "placeholder")
    mode = next(n.meta["val"].fake_mode for n in inputs if isinstance(n.meta["val"], torch.Tensor))
    for node in inputs[len(inputs) - count :]:
        with module.graph.inserting_before(first):
            size = module.graph.call_function(torch.ops.aten.sym_size.int, (node, 0))
        node.replace_all_uses_with(size, lambda user, size=size: user is not size)
        size.meta["val"] = node.meta["val"]
        with mode:
            node.meta["val"] = torch.empty(node.meta["val"], 0, device=device)
    module.recompile()


def _computed(expr: sympy.Basic, symbols: Mapping[sympy.Symbol, fx.Proxy]) -> fx.Node:
    try:
        node: fx.Node = expression_as_calls(expr, {s: symbols[s] for s in expr.free_symbols}).node
    except Exception as error:  # torch's interpreter does not support every function of sizes
        what = f"the size {expr} cannot be computed while a program runs: {error}"
        raise SizesError(what, remedy="leave this dim static: dynamic=False, or no dynamic_shapes for it") from error
    return node
