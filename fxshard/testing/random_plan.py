"""Random legal plans: whatever the rules offer must compute the right numbers, not only what the solver picks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.layout import Layout
from fxshard.mesh import Mesh, as_mesh
from fxshard.passes.annotate import Annotated, annotate
from fxshard.passes.choose import write_plan
from fxshard.passes.formulate import result_layouts
from fxshard.passes.trace import trace
from fxshard.planning_graph import PlanningGraph, operands, planned_nodes
from fxshard.redistribution import bytes_price
from fxshard.sharding_plan import OpSpec, ShardingPlan


def random_plan(
    model: nn.Module,
    example_args: Sequence[Any],
    mesh: Mesh | DeviceMesh,
    seed: int = 0,
    train: bool = True,
    example_kwargs: Mapping[str, Any] | None = None,
    whole_outputs: bool = False,
) -> ShardingPlan:
    """A plan that takes a random legal spec for every node, uneven and empty shards included.

    ``whole_outputs``: outputs, and inputs and buffers that are changed or have a gradient, are replicated, as a user of
    plain tensors needs them.
    """
    graph = trace(model, example_args, example_kwargs, train=train)
    return random_graph_plan(annotate(graph, as_mesh(mesh)), seed, whole_outputs)


def random_graph_plan(
    annotated: Annotated, seed: int | None, whole_outputs: bool = False, inputs: Mapping[str, Layout] | None = None
) -> ShardingPlan:
    """The same for a graph that is annotated already; ``inputs``: layouts by input name, the others are drawn.

    ``seed`` None: nothing is drawn, every node is replicated.
    """
    draw: Any = _First() if seed is None else random.Random(seed)
    graph = annotated.graph
    specs = {n.name: draw.choice(annotated.specs[n.name]) for n in planned_nodes(graph) if n.op != "output"}
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
    return write_plan(annotated, specs, bytes_price, "bytes")


class _First:
    """Chooses what stands first in a list: strategies and layouts begin with the replicated one."""

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
