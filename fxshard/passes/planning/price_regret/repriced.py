"""Evaluates a plan at other sizes than its example's, or under other prices: the cost of the plan's own entries, and its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fxshard.cost import bucketing_saving, time_price
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.redistribution import bucketed_price, bytes_price, communication_along, price_along
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.passes.annotation.recompute import expand, expanded
from fxshard.passes.memory.offload import PLACES, HostCopies
from fxshard.passes.memory.planned_memory import memory_at_peak
from fxshard.passes.planning.redistributions import Hides, Reader, hiding
from fxshard.plans.plan_data import Redistribution
from fxshard.plans.sharding_plan import ShardingPlan

SAME = 1e-9
"""Two figures count as equal up to this relative difference."""


def objective_at(plan: ShardingPlan, own: Annotated, there: Annotated, optimizer: Optimizer) -> float:
    """The cost of ``plan``, made for ``own`` and ``optimizer``, at the sizes and prices of ``there``: the same specs, steps and places, in
    the unit of its objective."""
    nodes, specs = expanded(there, plan.recomputed), plan.specs
    moves = [entry.cost for entry in moves_at(plan, own, there)]
    if plan.offloaded:
        copies = HostCopies(nodes.times, nodes.mesh, optimizer, plan.certificate.unit)
        places = {name: PLACES[kind] for name, kind in plan.on_host.items()}
        moves += [one.cost for one in copies.entries(specs, places)]
    if plan.certificate.unit == "bytes":
        return math.fsum([*(float(nodes.prices.sending(name, (specs[name],))[0]) for name in specs), *moves])
    return math.fsum([*(float(nodes.prices.computing(name, (specs[name],))[0]) for name in specs), *moves])


def moves_at(plan: ShardingPlan, own: Annotated, there: Annotated) -> list[Redistribution]:
    """The plan's redistributions with the shapes and prices of ``there``."""
    nodes = expanded(there, plan.recomputed)
    readers = partial(_readers, plan, nodes.times, own, expanded(own, plan.recomputed))
    hides = hiding(there, plan.recomputed) if plan.certificate.unit == "microseconds" else None
    return [_entry(one, nodes, hides, readers) for one in plan.redistributions]


def _entry(entry: Redistribution, nodes: Annotated, hides: Hides | None, readers: partial[Sequence[Reader]]) -> Redistribution:
    mesh, (extent, itemsize) = nodes.mesh, nodes.prices.extent(nodes.graph.by_name[entry.value])
    price = bytes_price if hides is None else time_price(mesh)
    way = entry.source, entry.steps, extent, itemsize, mesh, price
    beside = None if hides is None else hides(entry.value, readers(entry))
    joins = beside is not None and beside.joins
    cost = bucketed_price(*way, bucketing_saving(mesh)) if joins else price_along(*way)
    hidden = 0.0 if beside is None else float(beside.hidden(communication_along(*way)))
    shape = extent if isinstance(extent, tuple) else entry.shape
    return replace(entry, shape=shape, cost=cost - hidden, hidden=hidden)


def _readers(plan: ShardingPlan, times: Lifetimes, own: Annotated, nodes: Annotated, entry: Redistribution) -> Sequence[Reader]:
    """The readers beside which the entry is hidden: all readers of its value, or those in the forward or the backward, whichever gives the
    entry's hidden time."""
    value = times.graph.by_name[entry.value]
    found = [(node.name, k) for node in times.readers.get(value, ()) for k, read in enumerate(times.operands[node]) if read is value]
    if not own.mesh.hardware.overlap:
        return found
    hides = hiding(own, plan.recomputed)
    sent = communication_along(entry.source, entry.steps, *nodes.prices.extent(value), own.mesh, time_price(own.mesh))
    halves = [[r for r in found if times.in_backward(times.graph.by_name.get(r[0], value)) is late] for late in (False, True)]
    for some in (found, *halves):
        beside = hides(entry.value, some)
        if math.isclose(0.0 if beside is None else float(beside.hidden(sent)), entry.hidden, rel_tol=SAME, abs_tol=SAME):
            return some
    return found


def memory_at(plan: ShardingPlan, graph: PlanningGraph, sizes: Mapping[str, int], optimizer: Optimizer) -> int:
    """Peak bytes per device of ``plan`` at ``sizes`` of the graph's dynamic dims, by name."""
    assert graph.family is not None
    there = expand(replace(graph, module=graph.family.at(graph.family.with_derived(sizes)), family=None), plan.recomputed)
    return sum(memory_at_peak(Lifetimes(there), plan.specs, plan.redistributions, plan.mesh, optimizer, plan.on_host).values())
