"""Calls of DTensor's API in a graph that Dynamo captured: which they are, in which layouts.

Dynamo ran them on fake tensors, so the layouts of all DTensors are known from its example values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.dtensor.captured import captured_mesh
from fxshard.errors import PlanError, TraceError
from fxshard.graph.planning_graph import source_line
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh

METHODS = ("redistribute", "to_local", "full_tensor")
LOCAL = "_local_tensor"


@dataclass(frozen=True, eq=False)
class DTensorCall:
    """``node`` calls ``kind`` (``from_local``, or one of ``METHODS``) of ``value``.

    ``layout``: that of the DTensor which ``from_local`` or ``redistribute`` makes and ``to_local`` takes apart; ``gradient``: that of its
    gradient. ``parts``: (dim, number of shards) for each sharded dim. ``chosen``: whether the call itself gives the gradient's layout.
    """

    node: fx.Node
    kind: str
    value: fx.Node
    layout: Layout
    gradient: Layout
    parts: tuple[tuple[int, int], ...]
    device_mesh: DeviceMesh
    chosen: bool

    @property
    def is_whole(self) -> bool:
        """Whether the value and its gradient are equal on all ranks."""
        return self.layout.is_replicated and self.gradient.is_replicated

    @property
    def axes(self) -> str:
        return str(as_mesh(self.device_mesh))

    @property
    def layouts(self) -> tuple[str, str, str]:
        """(layout, layout of the gradient, axes), as fxshard's operators take them."""
        return str(self.layout), str(self.gradient), self.axes


def dtensor_calls_in(graph: fx.Graph) -> dict[fx.Node, DTensorCall]:
    """The calls of DTensor's API in a graph with Dynamo's example values, in order.

    Raises TraceError, with the user's line, for a call that cannot be planned, and PlanError for DTensors on two meshes.
    """
    found = {node: call for node in graph.nodes if (call := _read(node)) is not None}
    meshes = list(dict.fromkeys(call.device_mesh for call in found.values()))
    if len(meshes) > 1:
        what = f"one graph calls DTensor's functions for two meshes: {meshes[0]} and {meshes[1]}"
        raise PlanError(
            what, remedy="use one mesh for all: DTensors on the whole mesh, replicated over the axes that do not matter to them"
        )
    return found


def _read(node: fx.Node) -> DTensorCall | None:
    made = node.meta.get("example_value")
    if node.op == "call_function" and getattr(node.target, "__qualname__", "") == "DTensor.from_local":
        return _call(node, "from_local", made)
    source = node.args[0] if node.args else None
    value = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    if not isinstance(value, DTensor):
        return None
    if node.op == "call_function" and node.target is getattr and node.args[1] == LOCAL:
        return _call(node, LOCAL, value)
    if node.op == "call_method" and node.target in METHODS:
        return _call(node, str(node.target), made if node.target == "redistribute" else value)
    return None


def _call(node: fx.Node, kind: str, value: Any) -> DTensorCall:
    source = node.args[0] if node.args else node.kwargs.get("local_tensor")
    if not isinstance(value, DTensor) or not isinstance(source, fx.Node):
        raise _refused(node, kind, "its arguments are not known while the graph is captured", "pass the tensor, the mesh and placements")
    for name, given in node.kwargs.items():
        if name in ("forward_dtype", "backward_dtype") and given is not None:
            raise _refused(node, kind, f"{name} changes a dtype", "convert the tensor before it")
    whole = kind == "full_tensor"
    layout = _layout(node, kind, [Replicate()] * value.device_mesh.ndim if whole else value.placements)
    if kind in ("to_local", LOCAL):
        _check_pending(node, kind, source, layout)
    chosen: Any = node.kwargs.get("grad_placements")
    gradient = of_gradient(layout) if chosen is None else _layout(node, kind, chosen)
    mesh = captured_mesh(value)
    parts = tuple((p.dim, n) for p, n in zip(layout, mesh.shape, strict=True) if isinstance(p, Shard))
    if chosen is not None and value.requires_grad and _sharded(gradient) != _sharded(layout):
        what = f"grad_placements is {gradient}, so that the gradient would have another shape than the local tensor ({layout})"
        raise _refused(node, kind, what, "name the same sharded dims")
    return DTensorCall(node, kind, source, layout, gradient, parts, mesh, chosen is not None)


def _check_pending(node: fx.Node, kind: str, source: fx.Node, layout: Layout) -> None:
    """Raises TraceError for this rank's part of a computed average, maximum, minimum or product that is pending in eager execution: a plan
    may finish it, and parts of it do not add up as those of a sum do. What ``from_local`` or an argument gives stays as it is."""
    pending = next((p for p in layout if isinstance(p, Partial) and p.reduce_op != "sum"), None)
    given = source.op == "placeholder" or getattr(source.target, "__qualname__", "") == "DTensor.from_local"
    if pending is not None and not given:
        what = f"the value is pending as {Layout([pending])}, and the plan may reduce it, so that each rank would have another part of it"
        remedy = "redistribute to Replicate or Shard first, or return the DTensor; for what this rank computes alone, call to_local before"
        raise _refused(node, kind, what, remedy + " the reduction")


def _layout(node: fx.Node, kind: str, placements: Sequence[Placement]) -> Layout:
    strange = next((p for p in placements if type(p) not in (Shard, Replicate, Partial)), None)
    if strange is not None:
        raise _refused(node, kind, f"the placement {strange} is not supported", "redistribute to Shard, Replicate or Partial first")
    return Layout(placements)


def of_gradient(layout: Layout) -> Layout:
    """The layout of a gradient that DTensor guarantees: Replicate for Partial."""
    return Layout([Replicate() if p.is_partial() else p for p in layout])


def _sharded(layout: Layout) -> list[int | None]:
    return [p.dim if isinstance(p, Shard) else None for p in layout]


def _refused(node: fx.Node, kind: str, what: str, remedy: str) -> TraceError:
    return TraceError(f"{kind} of a DTensor cannot be planned: {what}", where=source_line(node), remedy=remedy)
