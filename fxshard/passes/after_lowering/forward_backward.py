"""Which part of a program runs in the forward and which in the backward, the same on all ranks.

A collective, and all that it needs, runs in the forward if an output or a mutation needs it, else in the backward. Where a program was
planned within a limit on memory, or computes activations again, its order decides instead: what stands behind the first reader of
a tangent is the backward's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxshard._torch_compat.nodes import inputs_of
from fxshard.errors import PlanError
from fxshard.graph.planning_graph import ancestors
from fxshard.program.sharded_program import ShardedProgram, is_collective


def forward_results(program: ShardedProgram) -> int:
    """How many results the forward returns: outputs and mutations come before gradients."""
    count = sum(o.kind != "gradient" for o in program.outputs)
    if any(o.kind == "gradient" for o in program.outputs[:count]):
        raise PlanError("the program returns gradients before outputs", remedy="this is a fault of the trace pass; please report it")
    return count


def by_order(program: ShardedProgram) -> bool:
    """Whether the order of a program says what runs in which half: it was planned within a limit on memory, which counts by that order,
    or computes activations again, or makes what it keeps."""
    plan = program.plan
    return plan.memory_limit is not None or bool(plan.recomputed) or any(entry.ahead for entry in plan.redistributions)


def forward_collectives(program: ShardedProgram) -> tuple[bool, ...]:
    """For each collective in order, whether it runs in the forward; the same on all ranks."""
    early = _first_of_first(program)
    return tuple(n in early for n in program.first.graph.nodes if is_collective(n))


def _first_of_first(program: ShardedProgram) -> set[fx.Node]:
    """What the first rank's forward runs; worked out once, and not to be changed."""
    known: set[fx.Node] | None = program.kept.get("forward")
    if known is None:
        graph = program.first.graph
        known = program.kept["forward"] = _first(program, graph, _results(program, graph))
    return known


def forward_nodes(program: ShardedProgram, graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a local graph that the forward runs for certain: where a shard is empty, what the other ranks' collectives need too."""
    if graph is program.first.graph and not by_order(program):  # whose own collectives decide
        return set(_first_of_first(program))
    collectives = [n for n in graph.nodes if is_collective(n)]
    needed = {n for n, early in zip(collectives, forward_collectives(program), strict=True) if early}
    waits = [wait for n in needed for wait in n.users]
    found = _first(program, graph, [*_results(program, graph), *waits])
    late = {n for n in collectives if n not in needed}
    for node in graph.nodes:
        if not late.isdisjoint(inputs_of(node)):  # and all that reads what they give
            late.add(node)
    return found - late


def _results(program: ShardedProgram, graph: fx.Graph) -> list[fx.Node]:
    return [n for n in returned(graph)[: forward_results(program)] if isinstance(n, fx.Node)]


def _first(program: ShardedProgram, graph: fx.Graph, ends: Sequence[fx.Node]) -> set[fx.Node]:
    """What is needed for ``ends``, and where the order decides, all that does not stand behind the first reader of a tangent."""
    needed = ancestors(ends)
    if not by_order(program):
        return needed
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = [n for n, end in zip(placeholders, program.inputs, strict=False) if end.kind == "tangent"]
    late = behind(graph, tangents, needed)
    return {n for n in graph.nodes if n not in late}


def behind(graph: fx.Graph, inputs: Sequence[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    """What stands behind the first reader of these inputs and is not among ``first``."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    turn = next((k for k, n in enumerate(calls) if any(i in inputs for i in n.all_input_nodes)), len(calls))
    return {n for n in calls[turn:] if n not in first}


def returned(graph: fx.Graph) -> tuple[Any, ...]:
    """What a local graph returns; None where a rank has no such gradient."""
    return tuple(graph.output_node().args[0])
