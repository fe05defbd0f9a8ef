"""Random legal plans: every plan that the rules allow must compute the right numbers, not only the solver's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.cost import time_price
from fxshard.graph.planning_graph import PlanningGraph, operands, planned_nodes, producer
from fxshard.layout.layouts import ROW_DIMS, Layout, on_experts, sharded_dim
from fxshard.layout.redistribution import bytes_price
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.passes.annotation.annotate import Annotated, annotate, input_layouts
from fxshard.passes.annotation.expert_values import expert_components
from fxshard.passes.memory.saved_for_backward import Modes
from fxshard.passes.planning.choose import Decision, write_plan
from fxshard.passes.planning.formulate import result_layouts
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan


def random_plan(
    model: nn.Module,
    example_args: Sequence[Any],
    mesh: Mesh | DeviceMesh,
    seed: int = 0,
    train: bool = True,
    example_kwargs: Mapping[str, Any] | None = None,
    whole_outputs: bool = False,
) -> ShardingPlan:
    """A plan with a random legal spec for every node, which may give uneven and empty shards.

    ``whole_outputs``: replicates outputs, and the inputs and buffers that are changed or have a gradient, as plain tensors require.
    """
    graph = trace(model, example_args, example_kwargs, train=train)
    return random_graph_plan(annotate(graph, as_mesh(mesh)), seed, whole_outputs)


def random_graph_plan(
    annotated: Annotated,
    seed: int | None,
    whole_outputs: bool = False,
    inputs: Mapping[str, Layout] | None = None,
    frugal: bool = False,
    timed: bool = False,
) -> ShardingPlan:
    """As ``random_plan``, for an annotated graph; ``inputs``: layouts of some inputs by name, while the others are random.

    ``seed`` None: every node is replicated. ``frugal``: also draws which values are saved for the backward, in which layouts, and which
    blocks are recomputed. ``timed``: paths and the objective minimise microseconds instead of bytes.
    """
    draw: Any = _FirstChoice() if seed is None else random.Random(seed)
    graph = annotated.graph
    offered = {**annotated.specs, **_expert_specs(annotated, draw)}
    specs = {n.name: draw.choice(offered[n.name]) for n in planned_nodes(graph) if n.op != "output"}
    specs |= {end.node: OpSpec((), (inputs[end.name],)) for end in graph.inputs if inputs and end.name in inputs}
    if whole_outputs:
        returned = {o.name for o in graph.outputs if o.kind != "output"}
        for end in (*graph.inputs_of("input"), *graph.inputs_of("buffer")):
            if end.name in returned:
                specs[end.node] = next(s for s in annotated.specs[end.node] if s.outputs[0].is_replicated)
    results = _results(annotated, specs, draw, whole_outputs)
    specs["output"] = OpSpec(results, ())
    for end in graph.inputs_of("tangent"):
        index = next(k for k, o in enumerate(graph.outputs) if o.tangent == end.name)
        specs[end.node] = OpSpec((), (results[index],))
    decision = _random_saving(annotated, specs, draw) if frugal else Decision(specs)
    price = (time_price(annotated.mesh), "microseconds") if timed else (bytes_price, "bytes")
    return write_plan(annotated, decision, *price)


def _expert_specs(annotated: Annotated, draw: Any) -> dict[str, Sequence[OpSpec]]:
    """The specs from which to choose those of nodes between tokens and experts. Nothing redistributes rows on the ranks of their experts:
    either none of a mixture's nodes has them, or all have, on the same axes."""
    found: dict[str, Sequence[OpSpec]] = {}
    for nodes in expert_components(annotated.graph, annotated.calls):
        stay = {name: [s for s in annotated.specs[name] if _row_places(s) == set()] for name in nodes}
        places = sorted({p for name in nodes for s in annotated.specs[name] for p in _row_places(s)}, key=str)
        way = draw.choice([None, *places])
        go = {name: [s for s in annotated.specs[name] if _row_places(s) == {way}] for name in nodes}
        found |= go if way is not None and all(go.values()) else stay
    return found


def _row_places(spec: OpSpec) -> set[tuple[Any, ...]]:
    """How rows on the ranks of their experts lie on the mesh, among the layouts of a spec: what no redistribution changes."""
    layouts = (layout for layout in (*spec.inputs, *spec.outputs) if layout.expert_axes)
    return {tuple(p if on_experts(p) or sharded_dim(p) in ROW_DIMS else None for p in layout) for layout in layouts}


def _random_saving(annotated: Annotated, specs: Mapping[str, OpSpec], draw: Any) -> Decision:
    """Recomputes random blocks; of the other values that both halves read, saves each in a random layout without pending sums."""
    modes = Modes(annotated.graph)
    redone = {block.name: tuple(n.name for n in block.nodes) for block in modes.blocks if draw.choice([True, False])}
    again_nodes = set(itertools.chain(*redone.values()))
    kept = {}
    for value in modes.times.values:
        crossing = modes.crossing(value)
        again = [r for r in modes.recomputed_readers(value) if modes.block[r].name in redone]
        if crossing is None or not (crossing.late or again) or producer(value)[0].name in again_nodes:
            continue
        source, output = producer(value)
        made = specs[source.name].outputs[output]
        others = [x for x in input_layouts(value, annotated.mesh) if not x.has_partial]
        kept[value.name] = draw.choice([made] if made.expert_axes else others)
    return Decision(specs, kept, redone)


class _FirstChoice:
    """Always chooses the first item: strategies and layouts begin with the replicated one."""

    def choice(self, options: Sequence[Any]) -> Any:
        return options[0]


def _results(annotated: Annotated, specs: Mapping[str, OpSpec], draw: Any, whole: bool) -> tuple[Any, ...]:
    graph: PlanningGraph = annotated.graph
    returned = operands(graph.module.graph.output_node())
    nodes = {i.name: i.node for i in graph.inputs if i.kind in ("parameter", "buffer", "input")}
    return tuple(
        draw.choice([x for x in result_layouts(node, annotated.mesh) if x.is_replicated or not whole])
        if end.kind == "output"
        else specs[nodes[end.name]].outputs[0]
        for end, node in zip(graph.outputs, returned, strict=True)
    )
