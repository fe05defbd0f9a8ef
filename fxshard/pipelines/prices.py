"""What each layer of a model costs on the axes inside a stage, by fxshard's own plans.

The whole model is planned once: it says in which layout each layer hands its result to the next. Then each layer is planned with these
layouts at both ends. Layers with equal graphs are planned once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate

from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.layout.layouts import Layout, sharded_dim
from fxshard.mesh.hardware import Link
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.lifetimes import shard_bytes
from fxshard.passes.memory.memory_over_time import Allocation, allocations, total_over_time
from fxshard.passes.pipeline import Compilation, Request, make_plan
from fxshard.pipelines.cut import Layer
from fxshard.pipelines.split import Passed, StageModule
from fxshard.plans.plan_data import PlanEnd
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.progress import watched

HELD = ("parameter", "buffer", "optimizer")


@dataclass(frozen=True)
class Priced:
    """The layers of a model with their prices, and the layouts of the values between them, by name."""

    layers: tuple[Layer, ...]
    layouts: Mapping[str, Layout]


def price(names: Sequence[str], pieces: Sequence[StageModule], whole: Request, mesh: Mesh, link: Link) -> Priced:
    """Prices of the layers ``names`` with modules ``pieces``, on ``mesh``, the axes inside a stage.

    ``whole``: the request for the whole model. ``link``: between ranks of adjacent stages.
    """
    layouts = _layouts(names, pieces, _planned(whole, mesh), mesh)
    known: dict[str, Layer] = {}
    found = []
    for i, (name, piece) in enumerate(zip(names, watched(pieces, "planning layers"), strict=True)):
        key = f"{i == 0, i == len(pieces) - 1} {_signature(piece)} {[layouts.get(v.name) for v in (*piece.inputs, *piece.outputs)]}"
        if key not in known:
            known[key] = _priced(piece, i == 0, i == len(pieces) - 1, whole, layouts, mesh)
        entering = [(shard_bytes(v.shape, v.dtype.itemsize, layouts[v.name], mesh.shape), v.trains) for v in piece.inputs] if i else []
        ways = [[size for size, _ in entering], [size for size, trains in entering if trains]]
        transfer = sum(link.latency + sum(way) / link.bandwidth * 1e6 for way in ways if way)
        found.append(replace(known[key], name=name, entering=sum(size for size, _ in entering), transfer=transfer))
    return Priced(tuple(found), layouts)


def _planned(request: Request, mesh: Mesh) -> Compilation:
    return make_plan(Compilation(mesh, request))


def _layouts(names: Sequence[str], pieces: Sequence[StageModule], whole: Compilation, mesh: Mesh) -> dict[str, Layout]:
    """The layout of every value that enters a layer other than the first: that of the result of the layer before in the plan of the whole
    model, if that is the only value with a gradient, else whole."""
    assert whole.plan is not None and whole.graph is not None
    found: dict[str, Layout] = {}
    for before, piece in zip(names, pieces[1:], strict=False):
        trained = [value for value in piece.inputs if value.trains]
        result = _result(whole.graph.returned.get(before, ()), whole.plan)
        for value in piece.inputs:
            alone = result is not None and trained == [value] and value.name not in found
            layout = _even(result, value.shape, mesh) if alone and result is not None else Layout.replicated(mesh.ndim)
            found.setdefault(value.name, layout)
    return found


def _result(calls: Sequence[Sequence[str | None]], plan: ShardingPlan) -> Layout | None:
    nodes = [node for node in calls[0] if node is not None] if calls else []
    return plan.specs[nodes[0]].outputs[0] if len(nodes) == 1 and nodes[0] in plan.specs else None


def _even(layout: Layout, shape: Sequence[int], mesh: Mesh) -> Layout:
    """The layout, replicated over axes that would shard unevenly, or that have a sum pending."""
    kept: list[Any] = []
    for i, placement in enumerate(layout):
        dim = sharded_dim(placement)
        parts = 1 if dim is None else mesh.shape[i] * torch.Size(mesh.shape[j] for j in range(i) if sharded_dim(kept[j]) == dim).numel()
        kept.append(placement if dim is not None and dim < len(shape) and shape[dim] % parts == 0 else Replicate())
    return Layout(kept)


def examples(values: Sequence[Passed]) -> tuple[torch.Tensor, ...]:
    """Tensors without memory that stand for ``values``."""
    return tuple(torch.empty(v.shape, dtype=v.dtype, device="meta", requires_grad=v.trains) for v in values)


def _priced(piece: StageModule, first: bool, last: bool, whole: Request, layouts: Mapping[str, Layout], mesh: Mesh) -> Layer:
    inputs = whole.input_layouts if first else {f"args[{i}]": layouts[v.name] for i, v in enumerate(piece.inputs)}
    outputs = whole.output_layouts if last else {f"outputs[{i}]": layouts[v.name] for i, v in enumerate(piece.outputs)}
    request = replace(whole, model=piece.module, args=examples(piece.inputs), kwargs={}, input_layouts=inputs, output_layouts=outputs)
    state = _planned(request, mesh)
    plan, annotated = state.plan, state.annotated
    assert plan is not None and annotated is not None
    times = annotated.times
    every = allocations(times, plan.specs, plan.redistributions, mesh, Optimizer.of(request.optimizer), plan.on_host)
    always = _total([one for one in every if one.kind in HELD])
    middle = times.backward_start
    saved = _total([x for x in every if x.kind not in (*HELD, "output", "gradient") and x.span[0] < middle < x.span[1]])
    peak = round(total_over_time(every).peak()[1])
    return Layer("", plan.objective, always, _gradients(plan), saved, max(0, peak - always - saved))


def _total(found: Sequence[Allocation]) -> int:
    return sum(one.bytes for one in found)


def _gradients(plan: ShardingPlan) -> int:
    """Bytes of the parameters' gradients while their sums over ranks are pending, until the last microbatch."""
    parameters = {end.name: end for end in plan.inputs if end.kind == "parameter"}
    moved = {number: entry for entry in plan.redistributions for reader, number in entry.readers if reader == "output"}
    nodes = {node.name: node for node in plan.nodes}
    total = 0
    for number, end in enumerate(plan.outputs):
        if end.kind == "gradient" and end.name in parameters:
            total += _pending_bytes(parameters[end.name], nodes, moved[number].source if number in moved else None, plan.mesh)
    return total


def _pending_bytes(parameter: PlanEnd, nodes: Mapping[str, Any], pending: Layout | None, mesh: Mesh) -> int:
    node = nodes[parameter.node]
    layout = pending if pending is not None and pending.has_partial else node.spec.outputs[0]
    dtype: torch.dtype = getattr(torch, node.dtypes[0])
    return shard_bytes(node.shapes[0], dtype.itemsize, layout, mesh.shape)


def _signature(piece: StageModule) -> str:
    """Text that is equal for layers with equal graphs: operators, sizes and parameters, without the numbers in names."""
    lines = [f"{p.shape} {p.dtype} {p.requires_grad}" for p in piece.module.parameters()]
    for module in piece.module.modules():
        graph = getattr(module, "graph", None)
        if isinstance(graph, fx.Graph):
            number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
            for node in graph.nodes:
                value = node.meta.get("val")
                sizes = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else ""
                given = fx.map_arg((node.args, node.kwargs), lambda n, number=number: number[n])
                target = node.op if node.op == "placeholder" else re.sub(r"\d+", "#", str(node.target))
                lines.append(f"{target} {given} {sizes}")
    return "\n".join(lines)
