"""Rows of experts that meet in one operator were sent with one ids: otherwise a rank has them in different orders, or has other rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from fxshard.errors import TraceError
from fxshard.graph.call import Call
from fxshard.graph.planning_graph import PlanningGraph, operands, plain_shape, planned_nodes, producer, source_line
from fxshard.passes.annotation.expert_values import END, START
from fxshard.plans.plan_data import OpSpec

KEEPING = ("alias", "clone", "contiguous", "detach", "expand", "reshape", "view", "_to_copy", "_unsafe_view")
"""Operators whose result has the values of their operand, if it has its shape, and integers of at least 32 bits where dtypes differ."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Route = tuple[int, str]
"""(number of the ids, number of experts): what decides which rows a rank has, and in which order."""


def check_expert_ids(graph: PlanningGraph, specs: Mapping[str, tuple[OpSpec, ...]], calls: Mapping[str, Call]) -> None:
    """Raises TraceError where rows sent with different ids meet in one operator, or where ids that ``to_experts`` returned are given to it
    or to ``from_experts``: they are in the order of the rows, and both take those in the order of tokens."""
    if not any(call.op == START for call in calls.values()):
        return
    ids_of, routes = _numbers(graph.nodes), dict[tuple[fx.Node, int], Route]()
    for node in planned_nodes(graph):
        call, given = calls.get(node.name), operands(node)
        found = [routes.get(producer(one)) for one in given]
        if call is None or not (call.op == START or any(found)):
            continue
        where = source_line(node) or f"node {node.name}"
        if call.op in (START, END):
            if found[1] is not None:
                remedy = "pass the ids given to to_experts: those that it returns are for expert_linear"
                raise TraceError(f"{call.op} has the ids that to_experts returned", where=where, remedy=remedy)
            found[1] = (ids_of[given[1]], str(call.arg(2)))
            if call.op == START:
                found[0] = found[1]
        spec = next((s for s in specs[node.name] if any(layout.expert_axes for layout in (*s.inputs, *s.outputs))), None)
        if spec is None:
            continue
        met = found[:2] if call.op in (START, END) else [r for r, x in zip(found, spec.inputs, strict=True) if x.expert_axes]
        if None in met:  # a value that is never on the ranks of experts: neither are the others here
            continue
        if len(set(met)) > 1:
            remedy = "give one tensor of ids to every to_experts and from_experts whose rows meet"
            raise TraceError(f"rows of experts that were sent with different ids meet in {call.op}", where=where, remedy=remedy)
        for i, layout in enumerate(spec.outputs):
            if layout.expert_axes and met[0] is not None:
                routes[node, i] = met[0]


def _numbers(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """A number for each value, the same for those computed alike (a recomputed forward) and for copies."""
    found, known = dict[fx.Node, int](), dict[str, int]()
    for node in nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and _keeps(node, source):
            found[node] = found[source]
            continue
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: ("value", found[n]))
        text = node.name if node.op != "call_function" else f"{node.target}{args}"
        found[node] = known.setdefault(text, len(known))
    return found


def _keeps(node: fx.Node, source: fx.Node) -> bool:
    """Whether the values of ``node`` are those of ``source``, in the same places."""
    new, old = node.meta.get("val"), source.meta.get("val")
    if _name(node) not in KEEPING or not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    holds = old.dtype in INTEGERS and new.dtype in (torch.int32, torch.int64)  # numbers of experts have fewer than 32 bits
    return plain_shape(new.shape) == plain_shape(old.shape) and (new.dtype == old.dtype or holds)


def _name(node: fx.Node) -> str:
    """The name of an operator without its overload."""
    return str(node.target).split(".")[-2] if str(node.target).count(".") else ""
