"""A traced graph for all sizes of its dynamic dims: its sizes are expressions in symbols, one symbol per dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import FakeTensor, FakeTensorMode
from fxshard._torch_compat.nodes import NodeMaker
from fxshard._torch_compat.sizes.symbols import SYMBOLIC, SymbolEnv, evaluated, expression, hint_of, plain
from fxshard.shapes.dims import DynamicDim
from fxshard.shapes.guards import Guard

NUMBERS = FakeTensorMode(allow_non_fake_inputs=True)
"""The fake mode of the values of all graphs at given sizes."""


@dataclass(frozen=True, eq=False)
class GraphFamily:
    """``module``: the graph; arguments and values that depend on a dynamic size are symbolic.

    ``symbols``: the symbol of each dim in ``dims``, by its name; ``guards``: the conditions on them that tracing assumed. ``derived``:
    dims whose size is an expression of other dims' symbols, such as that of a mask over a cache and a new token.
    """

    module: fx.GraphModule
    dims: tuple[DynamicDim, ...]
    symbols: Mapping[str, sympy.Symbol]
    guards: tuple[Guard, ...] = ()
    derived: Mapping[str, sympy.Basic] = field(default_factory=dict)

    def with_derived(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """``sizes`` (of the dims that are not derived) completed by those of the derived dims, in the order of ``dims``."""
        values = {self.symbols[name]: sympy.Integer(size) for name, size in sizes.items()}
        names = [dim.name for dim in self.dims]
        return {name: int(evaluated(self.derived[name], values)) if name in self.derived else sizes[name] for name in names}

    @cached_property
    def example(self) -> dict[str, int]:
        return {dim.name: dim.example for dim in self.dims}

    def at(self, sizes: Mapping[str, int]) -> fx.GraphModule:
        """The graph at these sizes, by name, with numbers for all symbols, as if traced there. Nodes keep their names."""
        values = {self.symbols[name]: sympy.Integer(size) for name, size in sizes.items()}
        return instantiated(self.module, values, lambda expr, hint: evaluated(expr, values), NUMBERS)

    def in_environment(self, env: SymbolEnv, sizes: Mapping[str, Any]) -> fx.GraphModule:
        """The graph in the symbolic environment ``env``: each symbol replaced by the expression or number in ``sizes``, by name."""
        values = {
            self.symbols[name]: expression(size) if isinstance(size, SYMBOLIC) else sympy.Integer(size) for name, size in sizes.items()
        }
        hints = {self.symbols[name]: sympy.Integer(hint_of(size) if isinstance(size, SYMBOLIC) else size) for name, size in sizes.items()}

        def make(expr: sympy.Basic, _: Any) -> Any:
            return env.value(expr.xreplace(values), evaluated(expr, hints))

        return instantiated(self.module, values, make, FakeTensorMode(allow_non_fake_inputs=True, shape_env=env.shape_env))


Make = Callable[[sympy.Basic, Any], Any]
"""(expression, its value in the example) -> its replacement."""


def instantiated(module: fx.GraphModule, values: Mapping[sympy.Symbol, sympy.Basic], make: Make, mode: FakeTensorMode) -> fx.GraphModule:
    """A copy of ``module`` with ``make`` applied to each symbolic number in its arguments and values; tensors are fakes of ``mode``."""
    known: dict[sympy.Basic, Any] = {}
    tensors: dict[Any, Any] = {}

    def number(value: Any) -> Any:
        expr = expression(value)
        if expr not in known:
            known[expr] = make(expr, hint_of(value))
        return known[expr]

    def number_at(value: Any) -> Any:
        return number(value) if isinstance(value, SYMBOLIC) else value

    def tensor(value: torch.Tensor) -> torch.Tensor:
        if value.layout != torch.strided:
            return value
        shape, strides = [number_at(s) for s in value.shape], [number_at(s) for s in value.stride()]
        key = (tuple(map(plain, shape)), tuple(map(plain, strides)), value.dtype)
        if key not in tensors:
            with mode:
                tensors[key] = torch.empty_strided(shape, strides, dtype=value.dtype)
        return tensors[key]

    def made(value: Any) -> Any:
        return tensor(value) if isinstance(value, FakeTensor) else number_at(value)

    def value_at(value: Any) -> Any:
        return made(value) if isinstance(value, FakeTensor) else pytree.tree_map(made, value)

    graph = fx.Graph()
    make_node = NodeMaker(graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        if _has_symbols(args) or _has_symbols(kwargs):
            args, kwargs = pytree.tree_map(number_at, (args, kwargs))
        meta = {**node.meta, **({"val": value_at(node.meta["val"])} if "val" in node.meta else {})}
        copies[node] = make_node(node.op, node.target, args, kwargs, node.name, meta)
        copies[node].type = node.type
    return fx.GraphModule(module, graph)


def _has_symbols(argument: Any) -> bool:
    """Whether an argument may contain symbols. Avoids pytree, because it runs for every node."""
    if isinstance(argument, (tuple, list)):
        return any(map(_has_symbols, argument))
    if isinstance(argument, dict):
        return any(map(_has_symbols, argument.values()))
    return isinstance(argument, (*SYMBOLIC, slice))
