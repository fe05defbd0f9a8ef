"""defer_reductions: leaves the gradients of a plan with their sums pending, so that they can be reduced later, all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from torch import fx
from torch.distributed.tensor import Partial

from fxshard.graph.planning_graph import PlanningGraph, operands, producer
from fxshard.layout.layouts import Layout
from fxshard.passes.annotation.annotate import annotate
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan

SUMS = ("sum", "avg")
"""Reductions that commute with adding up gradients: reducing the accumulated gradient gives the same result."""
Specs = Mapping[str, tuple[OpSpec, ...]]


def defer_reductions(graph: PlanningGraph, plan: ShardingPlan) -> ShardingPlan:
    """``plan`` without the final reduction of each parameter's gradient that is produced as a pending sum.

    If only the gradient passes through the operators after the sum (a view, a cast), they pass it on pending. Nothing else changes: the
    forward, the saved values and all other layouts stay. Gradients without a pending sum stay as well. Costs and memory are copied from
    ``plan``.
    """
    parameters = {i.name for i in graph.inputs_of("parameter")}
    rules = cache(lambda: annotate(graph, plan.mesh).specs)
    output, specs = graph.module.graph.output_node(), dict(plan.specs)
    returned, unread = list(specs[output.name].inputs), set()
    for k, (end, value) in enumerate(zip(graph.outputs, operands(output), strict=True)):
        if end.kind != "gradient" or end.name not in parameters:
            continue
        layout, passed = _pending(value, specs, rules)
        if layout is not None:
            specs |= passed
            returned[k] = layout
            unread |= {(output.name, k), *((name, 0) for name in passed)}
    specs[output.name] = OpSpec(tuple(returned), ())
    moves = [replace(m, readers=tuple(r for r in m.readers if r not in unread)) for m in plan.redistributions]
    from_here = {(m.value, m.source) for m in moves if m.readers}
    served = [m.readers or not was.readers or (m.value, m.target) in from_here for m, was in zip(moves, plan.redistributions, strict=True)]
    nodes = tuple(replace(n, spec=specs[n.name]) for n in plan.nodes)
    return replace(plan, nodes=nodes, redistributions=tuple(m for m, some in zip(moves, served, strict=True) if some))


def _pending(value: fx.Node, specs: Mapping[str, OpSpec], rules: Callable[[], Specs]) -> tuple[Layout | None, dict[str, OpSpec]]:
    """The layout of ``value`` with its sum pending (None if it has none), and the new specs of the operators that pass it on."""
    node, index = producer(value)
    made = specs[node.name].outputs[index] if node.name in specs else None
    if made is not None and _sums(made):
        return made, {}
    if node.op != "call_function" or len(operands(node)) != 1 or value is not node or len(value.users) != 1:
        return None, {}
    before, passed = _pending(operands(node)[0], specs, rules)
    spec = None if before is None else next((s for s in rules()[node.name] if s.inputs == (before,) and _sums(s.outputs[0])), None)
    return (None, {}) if spec is None else (spec.outputs[0], {**passed, node.name: spec})


def _sums(layout: Layout | None) -> bool:
    pending = [p for p in layout or () if isinstance(p, Partial)]
    return bool(pending) and all(p.reduce_op in SUMS for p in pending)
