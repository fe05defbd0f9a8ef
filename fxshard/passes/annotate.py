"""annotate: every node of a planning graph gets its OpStrategy, each legal way to run it on the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from fxshard.call import Call
from fxshard.layout import Layout, all_layouts, extent
from fxshard.mesh import Mesh
from fxshard.planning_graph import PlanningGraph, planned_nodes
from fxshard.sharding_plan import OpSpec
from fxshard.strategies import call_of, op_strategy
from fxshard.strategies.engine import created_reductions


@dataclass(frozen=True)
class Annotated:
    """A planning graph with the legal specs of each node but the output's; calls by node name; nodes without a rule listed.

    ``full``: those specs that the solver looks at: every rank holds something of every tensor (all specs, where there are
    none such), and what depends on no input (positions, tables) is whole.
    """

    graph: PlanningGraph
    mesh: Mesh
    specs: Mapping[str, tuple[OpSpec, ...]]
    full: Mapping[str, tuple[OpSpec, ...]]
    calls: Mapping[str, Call]
    fallbacks: tuple[tuple[str, str], ...]


def annotate(graph: PlanningGraph, mesh: Mesh) -> Annotated:
    """Strategies by node name: placeholders may be replicated or sharded, calls as their rules say."""
    calls = {n.name: call_of(n) for n in planned_nodes(graph) if n.op == "call_function"}
    reductions = frozenset({"sum"}.union(*map(created_reductions, set(calls.values()))))
    specs: dict[str, tuple[OpSpec, ...]] = {}
    full: dict[str, tuple[OpSpec, ...]] = {}
    fallbacks = []
    constant = constants(graph)
    for node in planned_nodes(graph):
        if node.op == "placeholder":
            shape = tuple(node.meta["val"].shape)
            specs[node.name] = tuple(OpSpec((), (layout,)) for layout in input_layouts(node, mesh))
            full[node.name] = _full(((), (shape,)), specs[node.name], mesh)
        elif node.op == "call_function":
            strategy = op_strategy(calls[node.name], mesh, reductions)
            specs[node.name] = strategy.specs
            kept = strategy.specs[:1] if node.name in constant else strategy.specs
            full[node.name] = _full_of_call(calls[node.name], kept, mesh)
            if strategy.fallback:
                fallbacks.append((node.name, strategy.reason))
    return Annotated(graph, mesh, specs, full, calls, tuple(fallbacks))


def constants(graph: PlanningGraph) -> frozenset[str]:
    """Nodes that depend on no input: many layers read them, and each rank makes them for nothing."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "call_function" and all(source.name in found for source in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


def input_layouts(node: fx.Node, mesh: Mesh) -> list[Layout]:
    """Layouts without Partial; dims of size 1 stay whole."""
    shape = tuple(node.meta["val"].shape)
    layouts = all_layouts(len(shape), mesh.ndim, reduce_ops=())
    return [layout for layout in layouts if all(shape[d] > 1 or not layout.axes_on(d) for d in range(len(shape)))]


Shapes = tuple[tuple[int, ...] | None, ...]


@lru_cache(maxsize=4096)
def _full_of_call(call: Call, specs: tuple[OpSpec, ...], mesh: Mesh) -> tuple[OpSpec, ...]:
    shapes = (tuple(m.shape for m in call.operands), tuple(None if m is None else m.shape for m in call.outputs))
    return _full(shapes, specs, mesh)


def _full(shapes: tuple[Shapes, Shapes], specs: tuple[OpSpec, ...], mesh: Mesh) -> tuple[OpSpec, ...]:
    tensors = [*shapes[0], *shapes[1]]
    kept = tuple(
        s
        for s in specs
        if not any(t is not None and has_empty_shard(t, layout, mesh) for t, layout in zip(tensors, (*s.inputs, *s.outputs), strict=True))
    )
    return kept or specs


@lru_cache(maxsize=65536)
def has_empty_shard(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether some rank holds nothing of a non-empty tensor."""
    last = [n - 1 for n in mesh.shape]
    for dim, size in enumerate(shape):
        axes = layout.axes_on(dim)
        if size and axes and not extent(size, tuple(mesh.shape[a] for a in axes), tuple(last[a] for a in axes))[1]:
            return True
    return False
