"""Decides which part of a program runs in the forward and which in the backward, the same on all ranks.

A collective, with everything that it needs, runs in the forward if an output or mutation needs it, else in the backward. If the program was
planned under a memory limit or recomputes activations, its order decides instead: everything from the first reader of a tangent on is in
the backward. A program without gradients is forward as a whole, with collectives that nothing reads too.
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
    """The number of results of the forward: outputs and mutations, which come before gradients."""
    count = sum(o.kind != "gradient" for o in program.outputs)
    if any(o.kind == "gradient" for o in program.outputs[:count]):
        raise PlanError("the program returns gradients before outputs", remedy="this is a fault of the trace pass; please report it")
    return count


def by_order(program: ShardedProgram) -> bool:
    """Whether the program's order decides what runs in which half: if it was planned under a memory limit, which assumes that order,
    recomputes activations, or makes copies for the backward in the forward."""
    plan = program.plan
    return plan.memory_limit is not None or bool(plan.recomputed) or any(entry.ahead for entry in plan.redistributions)


def has_backward(program: ShardedProgram) -> bool:
    """Whether the program returns gradients. All of a program without them is its forward, also what nobody reads."""
    return any(end.kind == "gradient" for end in program.outputs)


def forward_collectives(program: ShardedProgram) -> tuple[bool, ...]:
    """For each collective in order, whether it runs in the forward; the same on all ranks."""
    if not has_backward(program):  # without reading the graphs: a heartbeat asks, in its thread
        return (True,) * len(program.collectives)
    early = _forward_of_first_rank(program)
    return tuple(n in early for n in program.first.graph.nodes if is_collective(n))


def _forward_of_first_rank(program: ShardedProgram) -> set[fx.Node]:
    """The nodes that the first rank's forward runs; cached, not to be modified."""
    known: set[fx.Node] | None = program.cache.get("forward")
    if known is None:
        graph = program.first.graph
        known = program.cache["forward"] = _forward_of(program, graph, _results(program, graph))
    return known


def forward_nodes(program: ShardedProgram, graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a local graph that run in the forward; on a rank with an empty shard, also those that other ranks' collectives need."""
    if graph is program.first.graph and not by_order(program):  # its own collectives decide
        return set(_forward_of_first_rank(program))
    collectives = [n for n in graph.nodes if is_collective(n)]
    needed = {n for n, early in zip(collectives, forward_collectives(program), strict=True) if early}
    waits = [wait for n in needed for wait in n.users]
    found = _forward_of(program, graph, [*_results(program, graph), *waits])
    late = {n for n in collectives if n not in needed}
    for node in graph.nodes:
        if not late.isdisjoint(inputs_of(node)):  # and everything that depends on them
            late.add(node)
    return found - late


def _results(program: ShardedProgram, graph: fx.Graph) -> list[fx.Node]:
    return [n for n in returned(graph)[: forward_results(program)] if isinstance(n, fx.Node)]


def _forward_of(program: ShardedProgram, graph: fx.Graph, ends: Sequence[fx.Node]) -> set[fx.Node]:
    """The ancestors of ``ends``; if the order decides, all nodes before the first reader of a tangent as well; all nodes without a
    backward."""
    if not has_backward(program):
        return set(graph.nodes)
    needed = ancestors(ends)
    if not by_order(program):
        return needed
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = [n for n, end in zip(placeholders, program.inputs, strict=False) if end.kind == "tangent"]
    late = behind(graph, tangents, needed)
    return {n for n in graph.nodes if n not in late}


def behind(graph: fx.Graph, inputs: Sequence[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    """The calls from the first reader of these inputs on that are not in ``first``."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    turn = next((k for k, n in enumerate(calls) if any(i in inputs for i in n.all_input_nodes)), len(calls))
    return {n for n in calls[turn:] if n not in first}


def returned(graph: fx.Graph) -> tuple[Any, ...]:
    """The results of a local graph; None for a gradient that this rank does not have."""
    return tuple(graph.output_node().args[0])
