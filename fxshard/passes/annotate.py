"""annotate: every node of a planning graph gets its OpStrategy, each legal way to run it on the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from fxshard.call import Call, is_hashable
from fxshard.layout import Layout, all_layouts
from fxshard.mesh import Mesh
from fxshard.passes.alike import Alike
from fxshard.passes.lifetimes import Lifetimes
from fxshard.passes.overlap import Windows
from fxshard.passes.regions import region_specs
from fxshard.planning_graph import UNKNOWN, PlanningGraph, operands, plain_shape, planned_nodes, producer, run_time_cause
from fxshard.shapes import GraphFamily, broken
from fxshard.sharding_plan import WRITTEN_OUT, Fallbacks, OpSpec
from fxshard.strategies import OpStrategy, call_of, op_strategy
from fxshard.strategies.engine import created_reductions, passed_reductions


@dataclass(frozen=True)
class Annotated:
    """A planning graph, the legal specs and the calls of its nodes by name, and those that are always replicated, with reasons."""

    graph: PlanningGraph
    mesh: Mesh
    specs: Mapping[str, tuple[OpSpec, ...]]
    calls: Mapping[str, Call]
    fallbacks: Fallbacks

    @cached_property
    def windows(self) -> Windows:
        """The compute that can hide redistributions of its values."""
        return Windows(self.graph, self.mesh, self.specs, self.calls)

    @cached_property
    def times(self) -> Lifetimes:
        """When its values are read."""
        return Lifetimes(self.graph)

    @cached_property
    def written(self) -> Alike:
        """What was written down of its nodes in plans before: a question changes few of them."""
        return Alike()


def annotate(graph: PlanningGraph, mesh: Mesh) -> Annotated:
    """Strategies by node name: placeholders may be replicated or sharded, calls as their rules say.

    Of a graph with dynamic dims those that are legal at other sizes too: what fits the example by chance is not offered.
    """
    found = _annotated(graph, mesh)
    if graph.family is None:
        return found
    specs = dict(found.specs)
    for sizes in probes(graph.family, mesh):
        other = _annotated(replace(graph, module=graph.family.at(sizes), family=None), mesh).specs
        for name in specs.keys() & other.keys():
            legal = set(other[name])
            specs[name] = tuple(spec for spec in specs[name] if spec in legal)
    return replace(found, specs=specs)


PROBED = 2
"""At how many other sizes a spec must be legal."""


def probes(family: GraphFamily, mesh: Mesh) -> list[dict[str, int]]:
    """Sizes to ask at, different from dim to dim: multiples of the mesh's size by primes, or where shards may be uneven such as leave none
    empty; those that tracing took for granted."""
    count, found = math.prod(mesh.shape), []
    primes = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
    for shift in range(len(primes)):
        sizes = {}
        for k, dim in enumerate(family.dims):
            step = 1 if dim.uneven else count
            size = step * primes[(shift + k) % len(primes)] + (count * count if dim.uneven else 0)
            sizes[dim.name] = size if dim.most is None or size <= dim.most else max(dim.most // step, 1) * step
        fits = all(dim.least <= sizes[dim.name] <= (dim.most or sizes[dim.name]) for dim in family.dims)
        if fits and sizes not in found and broken(family.guards, sizes) is None:
            found.append(sizes)
    return found[:PROBED]


def _annotated(graph: PlanningGraph, mesh: Mesh) -> Annotated:
    calls = _calls(graph)
    late = {n.name: cause for n in planned_nodes(graph) if n.op == "call_function" and (cause := run_time_cause(n))}
    reductions = pending_reductions(graph, {name: call for name, call in calls.items() if name not in late})
    specs: dict[str, tuple[OpSpec, ...]] = {}
    fallbacks = []
    local = region_specs(graph, mesh)
    inputs: dict[tuple[tuple[int, ...], bool], tuple[OpSpec, ...]] = {}
    batches = {i.node for i in graph.inputs if i.kind in ("input", "tangent")}
    for node in planned_nodes(graph):
        if node.name in local:
            specs[node.name] = (local[node.name],)
        elif node.op == "placeholder":
            key = plain_shape(node.meta["val"].shape), node.name in batches
            if key not in inputs:
                inputs[key] = tuple(OpSpec((), (layout,)) for layout in input_layouts(node, mesh, batch=key[1]))
            specs[node.name] = inputs[key]
        elif node.op == "call_function":
            call = calls[node.name]
            strategy = _replicated(call, mesh, late[node.name]) if node.name in late else op_strategy(call, mesh, reductions[node.name])
            specs[node.name] = strategy.specs
            if strategy.fallback and calls[node.name].outputs:
                fallbacks.append((node.name, strategy.reason))
            if call.op == "fxshard.dropout.default" and call.arg(4, "inside", ""):
                kernels = "its kernels draw by place in the shard, so that it is scores, softmax, dropout and a product"
                fallbacks.append((node.name, f"{WRITTEN_OUT} {call.arg(4)} with dropout; {kernels}"))
    return Annotated(graph, mesh, specs, calls, tuple(fallbacks))


def _calls(graph: PlanningGraph) -> dict[str, Call]:
    """The calls of a graph; equal ones are one object, so that whoever asks about them again need not compare them."""
    known: dict[Call, Call] = {}
    calls = {n.name: call_of(n) for n in planned_nodes(graph) if n.op == "call_function"}
    return {name: known.setdefault(call, call) if is_hashable(call) else call for name, call in calls.items()}


def pending_reductions(graph: PlanningGraph, calls: Mapping[str, Call]) -> dict[str, frozenset[str]]:
    """For each call, the reductions that may be pending in an operand: sums, and what operators before it leave and pass on."""
    arriving: dict[str, frozenset[str]] = {}
    leaving: dict[str, frozenset[str]] = {}
    known: dict[Call, tuple[frozenset[str], frozenset[tuple[str, str]]]] = {}
    for node in planned_nodes(graph):
        call = calls.get(node.name)
        if call is None:
            continue
        if call not in known:
            known[call] = created_reductions(call), passed_reductions(call)
        created, passed = known[call]
        sources = {producer(o)[0].name for o in operands(node)}
        arriving[node.name] = frozenset({"sum"}.union(*(leaving.get(s, ()) for s in sources)))
        leaving[node.name] = created | {after for before, after in passed if before in arriving[node.name]}
    return arriving


def _replicated(call: Call, mesh: Mesh, reason: str) -> OpStrategy:
    whole = Layout.replicated(mesh.ndim)
    spec = OpSpec((whole,) * len(call.operands), (whole,) * len(call.outputs))
    return OpStrategy((spec,), True, reason)


def input_layouts(node: fx.Node, mesh: Mesh, *, batch: bool = False) -> list[Layout]:
    """Layouts without Partial; dims of size 1 and tensors of unknown size stay whole.

    ``batch``: dim 0 may be cut whatever its size: a last batch of one row lies as those before it, on one rank.
    """
    shape = plain_shape(node.meta["val"].shape)
    if UNKNOWN in shape:
        return [Layout.replicated(mesh.ndim)]
    layouts = all_layouts(len(shape), mesh.ndim, reduce_ops=())
    return [layout for layout in layouts if all(shape[d] > 1 or (batch and d == 0) or not layout.axes_on(d) for d in range(len(shape)))]
