"""``local_map`` regions: functions that the user wrote for shards, with the placements of their arguments and results.

While a model is captured, a call of one becomes ``to_local`` of its arguments, its body on shards, and ``from_local`` of its results.
Each of these nodes has one legal spec: the user's placements for ``to_local`` and ``from_local``, the unchanged shard for the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.dynamo.local_map import LocalMapCall, captured_local_maps
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import PlanningGraph, is_user_file, operands, outputs_of, planned_nodes, producer, source_line
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.trace.named_layouts import placements_on_mesh
from fxshard.plans.plan_data import OpSpec

TO, FROM = torch.ops.fxshard.to_local.default, torch.ops.fxshard.from_local.default
RANDOM = (torch.ops.fxshard.dropout.default, torch.ops.fxshard.random.default)


def regions() -> AbstractContextManager[None]:
    """While Dynamo captures a model: marks the arguments and results of its ``local_map`` regions."""
    return captured_local_maps(_located, _region)


def _region(function: Callable[..., Any], begins: Any, ends: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo captures this in place of a call; ``begins`` and ``ends`` come from ``_described``."""
    shards = [a if b is None else torch.ops.fxshard.to_local(a, *b) for a, b in zip(args, begins, strict=True)]
    result = function(*shards, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    if len(results) != len(ends):
        raise ValueError("local_map needs one entry of out_placements for each result")
    placed = []
    for value, end in zip(results, ends, strict=True):
        if end is not None:
            shape = list(value.shape)
            for dim, parts in end[0]:
                shape[dim] = shape[dim] * parts
            value = torch.ops.fxshard.from_local(value, shape, *end[1:])
        placed.append(value)
    return tuple(placed) if isinstance(result, (tuple, list)) else placed[0]


def _located(call: LocalMapCall) -> tuple[Any, Any]:
    """``_described``, with the user's line in its errors."""
    try:
        return _described(call)
    except TraceError as error:
        lines = ["{}:{}: {}".format(*frame) for frame in call.frames if is_user_file(frame[0])]
        raise TraceError(error.what, where=lines[-1] if lines else None, remedy=error.remedy) from None


def _described(call: LocalMapCall) -> tuple[Any, Any]:
    """(for each argument: shape of the shard, layout, layout of the gradient, axes; for each result: cuts, and the same three).

    A cut is (dim, number of parts). None for values that are not tensors. Gradients have DTensor's layouts: ``in_grad_placements``, by
    default the value's own, with Replicate for Partial. Raises TraceError for missing or impossible placements.
    """
    if call.inputs is None or call.device_mesh is None:
        what = "in_placements" if call.inputs is None else "device_mesh"
        raise TraceError(f"a local_map region has no {what}", remedy=f"give local_map {what}=")
    if call.spmd_types:
        raise TraceError("a local_map region asks for spmd_types, which are not checked here", remedy="leave spmd_types= out")
    mesh = call.device_mesh
    axes = ",".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if not mesh.mesh_dim_names:
        raise TraceError("the mesh of a local_map region has no axis names", remedy="give init_device_mesh mesh_dim_names=")
    if len(call.inputs) != len(call.shapes):
        what = f"a local_map region places {len(call.inputs)} arguments, it is called with {len(call.shapes)}"
        raise TraceError(what, remedy="give in_placements one entry for each argument; tuples of tensors are not supported")
    gradients = call.gradients or [None] * len(call.inputs)
    begins = [_begin(i, *entry, mesh.shape, axes) for i, entry in enumerate(zip(call.shapes, call.inputs, gradients, strict=True))]
    outputs = call.outputs if isinstance(call.outputs, tuple) else (call.outputs,)
    ends = [None if p is None else (_cuts(p, mesh.shape), str(Layout(p)), str(_of_gradient(p)), axes) for p in outputs]
    return tuple(begins), tuple(ends)


def _begin(index: int, shape: Any, placed: Any, gradient: Any, sizes: Sequence[int], axes: str) -> Any:
    if shape is None:
        return None
    if placed is None:
        raise TraceError(f"argument {index} of a local_map region is a tensor without placements", remedy="give it [Replicate()]")
    layout = Layout([Shard(p.dim % len(shape)) if isinstance(p, Shard) else p for p in placed])
    local = list(shape)
    for dim, parts in _cuts(layout, sizes):
        if local[dim] % parts:
            what = f"argument {index} of a local_map region has {shape[dim]} elements in dim {dim}, which are not cut evenly by {axes}"
            raise TraceError(what, remedy="pad it before the region, or place it otherwise: its function sees one shape on all ranks")
        local[dim] //= parts
    return tuple(local), str(layout), str(_of_gradient(layout) if gradient is None else Layout(gradient)), axes


def _cuts(placements: Any, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((p.dim, n) for p, n in zip(placements, sizes, strict=True) if isinstance(p, Shard))


def _of_gradient(placements: Any) -> Layout:
    return Layout([Replicate() if p.is_partial() else p for p in placements])


def region_specs(graph: PlanningGraph, mesh: Mesh) -> dict[str, OpSpec]:
    """The only legal spec of each node of a region, ``to_local`` and ``from_local`` included. Raises TraceError for a value that leaves a
    region without a placement, or for random numbers and communication inside."""
    nodes = planned_nodes(graph)
    if not any(node.target in (TO, FROM) for node in nodes):
        return {}
    local: set[fx.Node] = set()
    specs: dict[str, OpSpec] = {}
    whole = Layout.replicated(mesh.ndim)
    for node in nodes:
        reads = [producer(operand)[0] for operand in operands(node)]
        inside = [source for source in reads if source in local]
        if node.target is FROM:
            specs[node.name] = OpSpec((whole,), (_on(mesh, node),))
        elif node.target is TO:
            specs[node.name] = OpSpec((_on(mesh, node),), (whole,))
            local.add(node)
        elif inside:
            _check_inside(node, inside[0])
            specs[node.name] = OpSpec((whole,) * len(reads), tuple(whole for _ in outputs_of(node)))
            local.add(node)
    return specs


def _on(mesh: Mesh, node: fx.Node) -> Layout:
    """The layout of a ``to_local`` or ``from_local`` on the planning mesh, replicated on axes that the region does not name."""
    placed = placements_on_mesh(node, str(node.args[2]), str(node.args[4]), mesh, "a local_map region is for")
    ndim = (node.args[0] if node.target is TO else node).meta["val"].ndim
    layout = [placed.get(name, Replicate()) for name in mesh.axis_names]
    return Layout([Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in layout])


def _check_inside(node: fx.Node, source: fx.Node) -> None:
    if node.op == "output":
        raise TraceError(
            f"{source.name} is computed on shards in a local_map region and leaves it without a placement",
            where=source_line(source),
            remedy="pass as arguments all tensors that the region's function reads, also those that it closes over, and place each result",
        )
    if node.target in RANDOM or is_collective(node):
        kind = "draws random numbers" if node.target in RANDOM else "communicates"
        remedy = "draw before the region and pass the numbers" if node.target in RANDOM else "leave the result Partial, the plan reduces it"
        what = f"{node.target} {kind} in a local_map region, or between to_local and from_local"
        raise TraceError(what, where=source_line(node), remedy=remedy)


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` is a collective of the user's, or waits for one."""
    return "c10d" in str(node.target)


def check_collective(node: fx.Node) -> None:
    """Raises TraceError for a collective of the user's outside of a region: values are whole there, and would be added up once more."""
    if is_collective(node):
        what = f"the model calls a collective, {node.target}, where values are whole on every rank: the plan moves and reduces them"
        remedy = "leave it out, or return a DTensor and redistribute it; code on a rank's shard may stand in a local_map region, "
        remedy += "which returns Partial() for a sum"
        raise TraceError(what, where=source_line(node) or f"node {node.name}", remedy=remedy)
