"""Constraints in one form: patterns on the layouts of values and results, and a memory limit.

Pins come by the user's names (parameters, buffers, inputs, nodes; globs), as layouts, or as a partial plan.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import ConstraintError, LayoutError
from fxshard.layout import Layout, normal_placement, placement_str
from fxshard.mesh import Mesh
from fxshard.planning_graph import PlanningGraph, is_getitem, is_tensor, operands, outputs_of
from fxshard.sharding_plan import OpSpec, ShardingPlan

Pattern = tuple[Placement | None, ...]
"""One placement per axis; None leaves the axis free."""


@dataclass(frozen=True)
class Pin:
    """A pattern and where the user asked for it."""

    pattern: Pattern
    said: str

    def admits(self, layout: Layout) -> bool:
        return all(want is None or want == have for want, have in zip(self.pattern, layout, strict=True))


@dataclass(frozen=True)
class Constraints:
    """``values``: node (placeholder, call or getitem) -> pins on its layout; ``results``: output index -> pins on the
    layout in which it is returned; ``specs``: node -> the OpSpec it must have (empty inputs leave them free)."""

    values: Mapping[str, tuple[Pin, ...]] = field(default_factory=dict)
    results: Mapping[int, tuple[Pin, ...]] = field(default_factory=dict)
    specs: Mapping[str, OpSpec] = field(default_factory=dict)
    memory_limit: int | None = None


def constraints_of(
    graph: PlanningGraph,
    mesh: Mesh,
    *,
    input_layouts: Any = None,
    output_layouts: Any = None,
    pins: Mapping[str, Any] | ShardingPlan | None = None,
    memory_limit: int | None = None,
) -> Constraints:
    """Reads what the user gave; raises ConstraintError for names that match nothing and LayoutError for bad layouts."""
    values: dict[str, tuple[Pin, ...]] = {}
    inputs = [(i.name, graph.by_name[i.node]) for i in graph.inputs_of("input")]
    for name, layout in _by_name(input_layouts, [n for n, _ in inputs], "input_layouts"):
        node = dict(inputs)[name]
        _add(values, node.name, Pin(pattern(layout, mesh, _ndim(node), f"input {name}"), f"input_layouts[{name}]={_show(layout)}"))
    results: dict[int, tuple[Pin, ...]] = {}
    ends = {o.name: i for i, o in enumerate(graph.outputs) if o.kind == "output"}
    returned = operands(graph.module.graph.output_node())
    for name, layout in _by_name(output_layouts, list(ends), "output_layouts"):
        index = ends[name]
        results[index] = (Pin(pattern(layout, mesh, _ndim(returned[index]), f"output {name}"), f"output_layouts[{name}]={_show(layout)}"),)
    specs: Mapping[str, OpSpec] = {}
    if isinstance(pins, ShardingPlan):
        specs = _plan_pins(graph, mesh, pins)
    else:
        for name, layout in (pins or {}).items():
            for node in _matches(graph, name):
                _add(values, node.name, Pin(pattern(layout, mesh, _ndim(node), f"{name!r} ({node.name})"), f"pins[{name!r}]={_show(layout)}"))
    return Constraints(values, results, specs, memory_limit)


def pattern(layout: Any, mesh: Mesh, ndim: int, what: str) -> Pattern:
    """Reads ``"RS(0)"``, a sequence of placements (None: free), or ``{"tp": Shard(0)}`` (axes not named stay free)."""
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    if isinstance(layout, Mapping):
        named = {mesh.axis(axis): placement for axis, placement in layout.items()}
        layout = [named.get(i) for i in range(mesh.ndim)]
    if not isinstance(layout, Sequence) or not all(p is None or isinstance(p, Placement) for p in layout):
        raise LayoutError(f"cannot read layout {layout!r} of {what}", remedy="write 'RS(0)', a sequence of placements, or {'tp': Shard(0)}")
    if len(layout) != mesh.ndim:
        raise LayoutError(
            f"layout {_show(layout)} of {what} has {len(layout)} placements, the mesh has {mesh.ndim} axes ({mesh})",
            remedy="give one placement per mesh axis, in mesh order",
        )
    return tuple(None if p is None else normal_placement(p, ndim, what) for p in layout)


def _show(layout: Any) -> str:
    if isinstance(layout, Mapping):
        return "{" + ", ".join(f"{k}: {placement_str(v)}" for k, v in layout.items()) + "}"
    if isinstance(layout, str):
        return repr(layout)
    return "".join("*" if p is None else placement_str(p) for p in layout)


def _ndim(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _add(values: dict[str, tuple[Pin, ...]], name: str, pin: Pin) -> None:
    values[name] = (*values.get(name, ()), pin)


def _by_name(given: Any, names: list[str], what: str) -> list[tuple[str, Any]]:
    """(name, layout) pairs from a mapping by name, a sequence in order (None: free), or one layout for all."""
    if given is None:
        return []
    if isinstance(given, str) or (isinstance(given, Sequence) and given and all(isinstance(p, Placement) for p in given)):
        return [(name, given) for name in names]
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                raise ConstraintError(f"{what} names {name!r}, which is none of {', '.join(names) or 'no tensors'}", remedy=_closest(name, names))
        return list(given.items())
    given = list(given)
    if len(given) != len(names):
        raise ConstraintError(f"{what} has {len(given)} layouts for {len(names)} tensors", remedy=f"give one for each of {', '.join(names)}, None where free")
    return [(name, layout) for name, layout in zip(names, given, strict=True) if layout is not None]


def _matches(graph: PlanningGraph, name: str) -> list[fx.Node]:
    """Nodes that a pin means: by the user's name or glob of a parameter, buffer or input, else by node name or glob."""
    known = {i.name: i.node for i in graph.inputs}
    known.update({alias: known[target] for alias, target in graph.aliases.items() if target in known})
    tensors = {n.name: n for n in graph.nodes if n.op != "output" and is_tensor(n)}
    found = [graph.by_name[node] for user, node in known.items() if user == name or fnmatch.fnmatchcase(user, name)]
    found = found or [n for node, n in tensors.items() if node == name or fnmatch.fnmatchcase(node, name)]
    if not found:
        names = [*known, *tensors]
        raise ConstraintError(f"pin {name!r} matches no parameter, buffer, input or node", remedy=_closest(name, names))
    return list(dict.fromkeys(found))


def _closest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]!r}?" if close else "fxshard inspect --nodes lists the names of a plan"


def _plan_pins(graph: PlanningGraph, mesh: Mesh, plan: ShardingPlan) -> dict[str, OpSpec]:
    """The OpSpecs of a (partial) plan; its nodes must be this graph's."""
    if plan.mesh.shape != mesh.shape or plan.mesh.axis_names != mesh.axis_names:
        raise ConstraintError(f"the plan is for mesh {plan.mesh}, not {mesh}", remedy="plan for this mesh")
    specs = {}
    for node in plan.nodes:
        if node.name not in graph.by_name:
            raise ConstraintError(f"the plan names node {node.name!r}, which this graph lacks", remedy=_closest(node.name, list(graph.by_name)))
        target = graph.by_name[node.name]
        if is_getitem(target):
            raise ConstraintError(f"the plan names {node.name!r}, one output of an operator", remedy=f"name {target.args[0]} instead")
        _check_spec(target, node.spec, mesh)
        specs[node.name] = node.spec
    return specs


def _check_spec(node: fx.Node, spec: OpSpec, mesh: Mesh) -> None:
    tensors = [(o.meta["val"], layout) for o, layout in zip(operands(node), spec.inputs, strict=False)]
    tensors += [(v, layout) for v, layout in zip(outputs_of(node), spec.outputs, strict=False) if v is not None]
    for value, layout in tensors:
        pattern(layout, mesh, value.dim(), f"{node.name} in the plan")
