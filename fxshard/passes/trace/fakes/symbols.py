"""Dynamic sizes during a trace: makes inputs with symbolic dims, collects guards, and instantiates the graph at the example's sizes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat.fakes import FakeTensor
from fxshard._torch_compat.sizes.divisions import divisions_by_zero
from fxshard._torch_compat.sizes.symbols import (
    SymbolEnv,
    captured_sizes,
    expression,
    hint_of,
    is_symbolic,
    noted_guards,
    noting_lines,
    oblivious,
    quiet_symbols,
    symbol_of,
)
from fxshard.errors import StaticDimError, TraceError
from fxshard.graph.planning_graph import UNKNOWN, PlanningGraph, is_number, is_tensor, is_user_file, plain_shape, source_line, user_location
from fxshard.shapes import DynamicDim, GraphFamily, Guard, determined_by, distinct, first_broken, fixes_jointly, guards_of, tie_remedy

RETURNED_SIZE = "leave that dim static, or return a tensor and take its size outside of the model"
ROOM = 64


def _candidate_sizes(dim: DynamicDim) -> set[int]:
    """Sizes to try, to find out whether a dim may differ from the example: small ones, those near the example, and powers of two."""
    small, about = range(dim.least, dim.least + ROOM), range(dim.example - ROOM, dim.example + ROOM)
    return {*small, *about, 2 * dim.example, 4 * dim.example, *(2**k for k in range(24))}


class Symbols(contextlib.AbstractContextManager[None]):
    """The symbols of one trace; within it torch does not specialise on sizes 0 and 1 of the example."""

    def __init__(self, dims: Sequence[DynamicDim]) -> None:
        self.dims = tuple(dims)
        self.inputs: dict[str, list[int | None]] = {}
        """Shapes of the input tensors by path, None for dynamic sizes."""
        self.reset()

    def reset(self) -> None:
        """Resets symbols and guards for another attempt at tracing."""
        self.env = SymbolEnv()
        self.captured: tuple[Guard, ...] = ()
        self.named: dict[sympy.Symbol, str] = {}

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        if self.dims:
            self._stack.enter_context(oblivious())
            self._stack.enter_context(quiet_symbols())
            self._stack.enter_context(divisions_by_zero())
            self._stack.enter_context(noting_lines(is_user_file, user_location))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def fake(self, path: str, value: Any) -> Any:
        """``value``, a fake of the example at ``path``, with symbols for its dynamic dims."""
        places = {dim: one for one in self.dims for where, dim in one.places if where == path}
        if self.dims and isinstance(value, FakeTensor):
            self.inputs[path] = [None if d in places else int(size) for d, size in enumerate(value.shape)]
        if not places or not isinstance(value, FakeTensor):
            return value
        shape = [
            self.env.symbol(places[d].name, places[d].example, places[d].least, places[d].most) if d in places else size
            for d, size in enumerate(value.shape)
        ]
        order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
        with value.fake_mode:
            made = torch.empty_permuted(shape, order, dtype=value.dtype)
        return made.requires_grad_(value.requires_grad)

    def record_guards(self, captured: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Records the guards of Dynamo's capture, which uses symbols of its own for the sizes of ``inputs``.

        Raises StaticDimError, naming the line, for a dynamic dim that the model fixes to one size.
        """
        if not self.dims:
            return
        own = captured_sizes(captured, inputs)
        names = {symbol_of(value): name for name, value in self.env.known.items()}
        named = {theirs: names[symbol_of(value)] for theirs, value in own.items() if symbol_of(value) in names}
        self.named = named
        found = []
        for expr, where in noted_guards(captured.meta["fake_mode"].shape_env):
            symbols = tuple((named[s], s, 1) for s in sorted(expr.free_symbols, key=str) if s in named)
            if expr.xreplace({s: sympy.Symbol(name, integer=True) for name, s, _ in symbols}) != sympy.true:  # dims with one name are equal
                found.append(Guard(expr, symbols, where))
        self.captured = tuple(found)
        for theirs, name in named.items():
            settled = captured.meta["fake_mode"].shape_env.replacements.get(theirs)
            if isinstance(settled, sympy.Integer):
                self._refuse(next(d for d in self.dims if d.name == name), settled, self.captured)

    def size(self, name: str) -> torch.SymInt:
        """The symbolic size of a dynamic dim; ``fake`` must have seen it in an input."""
        return self.env.known[name]

    def name_of(self, size: Any) -> Any:
        """The name of the dynamic dim for a size that Dynamo captured; the size itself if it belongs to none."""
        return self.named.get(expression(size), size) if is_symbolic(size) else size

    def refuse_returned(self, joint: fx.GraphModule) -> None:
        """Raises TraceError, with the user's line and the names of the dims, if a joint graph returns a size that changes."""
        named = {symbol_of(value): sympy.Symbol(name) for name, value in self.env.known.items()}
        for node in joint.graph.output_node().all_input_nodes:
            if _is_size(node) and expression(node.meta["val"]).free_symbols:
                size = expression(node.meta["val"]).xreplace(named)
                what = f"the model returns a size that changes ({size}) as a number, or leaves it in an object"
                raise TraceError(what, where=source_line(node), remedy=RETURNED_SIZE)

    def at_example(self, graph: PlanningGraph) -> PlanningGraph:
        """The graph at the example's sizes, with its family; unchanged if no dim is dynamic.

        Raises StaticDimError, naming the line, for a dynamic dim that the model fixes to one size, TraceError for a size known only at
        run time.
        """
        if not self.dims:
            return graph
        self._refuse_unknown(graph)
        symbols = {name: symbol_of(value) for name, value in self.env.known.items()}
        guards = distinct((*self.captured, *guards_of(self.env.known)))
        for dim in self.dims:
            self._refuse_static(dim, guards)
        self._refuse_together(guards)
        family = GraphFamily(
            graph.module, tuple(d for d in self.dims if d.name in symbols), symbols, guards, determined_by(guards, symbols)
        )
        return replace(graph, module=family.at(family.example), family=family)

    def _refuse_static(self, dim: DynamicDim, guards: Sequence[Guard]) -> None:
        known = self.env.known.get(dim.name)
        if known is not None and isinstance(expression(known), sympy.Integer):
            self._refuse(dim, expression(known), guards)
        own = [guard for guard in guards if {name for name, *_ in guard.symbols} == {dim.name}]
        others = [n for n in _candidate_sizes(dim) if n != dim.example and n >= dim.least and (dim.most is None or n <= dim.most)]
        if own and others and all(first_broken(own, {dim.name: size}) is not None for size in others):
            self._refuse(dim, sympy.Integer(dim.example), own)

    def _refuse(self, dim: DynamicDim, size: sympy.Integer, guards: Sequence[Guard]) -> None:
        named = [g for g in guards if any(name == dim.name for name, *_ in g.symbols)]
        cause = next((g for g in named if isinstance(g.expression, sympy.Eq)), named[0] if named else None)
        error = StaticDimError(
            f"{dim.name} ({dim}) cannot change, the model fixes it to {size}" + (f": it takes for granted that {cause}" if cause else ""),
            where=cause.where if cause else None,
            remedy=tie_remedy([dim], self.inputs),
        )
        error.dim = dim.name
        raise error

    def _refuse_together(self, guards: Sequence[Guard]) -> None:
        """Raises StaticDimError if a guard fixes a combination of dims that the user asked for, so that none of them can grow."""
        asked = {dim.name: dim for dim in self.dims if dim.required}
        tie = next((g for g in guards if fixes_jointly(g) and all(name in asked for name, *_ in g.symbols)), None)
        if tie is not None:
            dims = [dim for dim in self.dims if dim.name in {name for name, *_ in tie.symbols}]
            said = " and ".join(f"{dim.name} ({dim})" for dim in dims)
            what = f"{said} cannot change freely: the model takes for granted that {tie}"
            raise StaticDimError(what, where=tie.where, remedy=tie_remedy(dims, self.inputs))

    def _refuse_unknown(self, graph: PlanningGraph) -> None:
        found = next((n for n in graph.nodes if is_tensor(n) and UNKNOWN in plain_shape(n.meta["val"].shape)), None)
        if found is not None:
            raise TraceError(
                f"{found.name} ({found.target}) has a size known only at run time, which cannot be combined with dynamic sizes",
                remedy="plan for one size: leave out dynamic_shapes, or pass dynamic=False",
            )


def fold_sizes(joint: fx.GraphModule) -> None:
    """Replaces nodes that only compute sizes by symbolic numbers in the arguments of their users.

    Renames the other calls as they would be named with static sizes.
    """
    if not any(_is_size(node) for node in joint.graph.nodes):
        return
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in joint.graph.nodes:
        if _is_size(node):
            size = node.meta["val"]
            copies[node] = size if expression(size).free_symbols else hint_of(size)
            continue
        name = re.sub(r"_\d+$", "", node.name) if node.op == "call_function" else node.name
        copies[node] = copy = graph.create_node(node.op, node.target, name=name)
        copy.args, copy.kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copy.meta = dict(node.meta)
    joint.graph = graph


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and is_number(node)
