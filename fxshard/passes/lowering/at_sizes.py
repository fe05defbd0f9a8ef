"""Specialises a program with dynamic sizes: every symbol becomes a number, as if the program had been lowered for these sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import FakeTensor
from fxshard._torch_compat.sizes.symbols import SYMBOLIC, evaluated, expression
from fxshard.cost.timeline import TIME_KEY, bytes_sent
from fxshard.errors import SizesError
from fxshard.graph.planning_graph import source_line
from fxshard.passes.lowering.local_graph import FAKES
from fxshard.program.sharded_program import ShardedProgram, SizeClass, is_collective
from fxshard.shapes import evaluate_all, instantiated, sizes_named


def program_at(program: ShardedProgram, sizes: Mapping[str, int]) -> ShardedProgram:
    """``program`` at ``sizes``, by name; unchanged if it has no dynamic sizes. Raises SizesError for sizes that it does not serve."""
    if not program.sizes:
        return program
    reason = program.refuses(sizes)
    if reason is not None:
        raise SizesError(reason, remedy="lower or export the model for these sizes separately")
    values = program.values(sizes)
    modules, classes = _at_values(program, values, sizes)
    first = modules[classes[program.origin]].graph
    collectives = []
    for one, node in zip(program.collectives, filter(is_collective, first.nodes), strict=True):
        sent = bytes_sent(node, program.mesh.shape[program.mesh.axis(one.axis)])
        collectives.append(replace(one, bytes=sent, shape=tuple(node.all_input_nodes[0].meta["val"].shape)))
    return replace(
        program,
        modules=modules,
        classes=classes,
        input_shapes=tuple(evaluate_all(shape, values) for shape in program.input_shapes),
        output_shapes=tuple(evaluate_all(shape, values) for shape in program.output_shapes),
        collectives=tuple(collectives),
        sizes=(),
        guards=(),
        ranks=(),
    )


def _at_values(
    program: ShardedProgram, values: Mapping[sympy.Symbol, sympy.Integer], sizes: Mapping[str, int]
) -> tuple[dict[SizeClass, fx.GraphModule], dict[tuple[int, ...], SizeClass]]:
    """(local graphs, class of each rank) with these values for the symbols; ranks of one class whose sizes are then equal share a graph."""
    spelled = {key: _expressions(module) for key, module in program.modules.items()}
    known: dict[Any, Any] = {}
    modules: dict[SizeClass, fx.GraphModule] = {}
    classes: dict[tuple[int, ...], SizeClass] = {}
    for coordinate, key in program.classes.items():
        own = program.coordinate_values(coordinate)
        numbers: dict[sympy.Basic, Any] = {}
        for expr in spelled[key]:
            place = (expr, *(own[s] for s in sorted(expr.free_symbols & own.keys(), key=str)))
            if place not in known:
                try:
                    known[place] = _checked_64_bits(evaluated(expr, {**values, **own}))
                except ArithmeticError as error:  # the model computes with sizes, such as 1 / (n - 1)
                    what = f"a number that is computed from sizes has no value at {sizes_named(sizes)}: {error}"
                    where = _line_that_reads(program.modules[key], expr)
                    raise SizesError(what, where=where, remedy="lower the graph for these sizes separately") from error
            numbers[expr] = known[place]
        there = (*key, tuple(numbers[expr] for expr in spelled[key] if expr.free_symbols & own.keys())) if own else key
        classes[coordinate] = there
        if there not in modules:
            modules[there] = _with_numbers(program.modules[key], numbers)
    return modules, classes


def _checked_64_bits(number: Any) -> Any:
    if isinstance(number, int) and not -(2**63) <= number < 2**64:
        raise OverflowError("it does not fit in 64 bits, and no operator accepts that")
    return number


def _line_that_reads(module: fx.GraphModule, expr: sympy.Basic) -> str | None:
    """The user's source line of the first node that has this expression among its arguments; else the node's name."""
    for node in module.graph.nodes:
        if any(isinstance(part, SYMBOLIC) and expression(part) == expr for part in pytree.tree_leaves((node.args, node.kwargs))):
            return source_line(node) or f"node {node.name}"
    return None


def first_at_memory_sizes(program: ShardedProgram) -> fx.GraphModule:
    """The first rank's graph at the sizes that the plan's memory refers to; unchanged without dynamic sizes."""
    if not program.sizes:
        return program.first
    return _with_numbers(program.first, {expr: evaluated(expr, program.memory_values) for expr in _expressions(program.first)})


def _with_numbers(module: fx.GraphModule, numbers: Mapping[sympy.Basic, Any]) -> fx.GraphModule:
    made = instantiated(module, {}, lambda expr, _: numbers[expr], FAKES)
    for node in made.graph.nodes:
        node.meta.pop(TIME_KEY, None)  # the time at the example's sizes
    return made


def _expressions(module: fx.GraphModule) -> tuple[sympy.Basic, ...]:
    """The distinct expressions in a graph's arguments and values."""
    found: dict[sympy.Basic, None] = {}
    for node in module.graph.nodes:
        for part in pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val"))):
            sizes = (*part.shape, *part.stride()) if isinstance(part, FakeTensor) and part.layout == torch.strided else (part,)
            found.update(dict.fromkeys(expression(size) for size in sizes if isinstance(size, SYMBOLIC)))
    return tuple(found)
