"""Constraints in one form: patterns on the layouts of values and results, and a memory limit.

Pins come by the user's names (parameters, buffers, inputs, nodes; globs), as layouts, or as a partial plan.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import ConstraintError, LayoutError, OptionError, closest
from fxshard.layout import Layout, normal_placement, placement_str
from fxshard.mesh import Mesh
from fxshard.planning_graph import PlanningGraph, is_getitem, is_tensor, operands, outputs_of, planned_nodes, source_line
from fxshard.sharding_plan import OpSpec, ShardingPlan

Pattern = tuple[Placement | None, ...]
"""One placement per axis; None leaves the axis free."""


@dataclass(frozen=True)
class Pin:
    """A pattern, where the user asked for it, and of a node with several results the one it is for."""

    pattern: Pattern
    said: str
    output: int = 0

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
    for name, layout in _by_name(input_layouts, [n for n, _ in inputs], mesh, "input_layouts"):
        node = dict(inputs)[name]
        _add(values, node.name, _pin(layout, mesh, node.meta["val"], f"input {name}", f"input_layouts[{name}]"))
    results: dict[int, tuple[Pin, ...]] = {}
    ends = {o.name: i for i, o in enumerate(graph.outputs) if o.kind == "output"}
    returned = operands(graph.module.graph.output_node())
    for name, layout in _by_name(output_layouts, list(ends), mesh, "output_layouts"):
        index = ends[name]
        results[index] = (_pin(layout, mesh, returned[index].meta["val"], f"output {name}", f"output_layouts[{name}]"),)
    specs: Mapping[str, OpSpec] = {}
    if isinstance(pins, ShardingPlan):
        specs = _plan_pins(graph, mesh, pins)
        for name, pin in _follow_inputs(graph, specs):
            _add(values, name, pin)
    elif not isinstance(pins or {}, Mapping) or not all(isinstance(name, str) for name in pins or {}):
        remedy = "give {'layers.*.weight': 'RS(0)'}, or a ShardingPlan"
        raise OptionError(f"cannot read pins={pins!r}: names (text) and their layouts are needed", where="pins", remedy=remedy)
    else:
        for name, layout in (pins or {}).items():
            for node in _matches(graph, name, layout):
                for pin in _pins(name, layout, mesh, node):
                    _add(values, node.name, pin)
    number = isinstance(memory_limit, (int, float)) and not isinstance(memory_limit, bool)
    if memory_limit is not None and not (number and 0 <= memory_limit < math.inf):
        raise OptionError(f"cannot read memory_limit={memory_limit!r}", where="memory_limit", remedy="give a number of bytes per device")
    return Constraints(values, results, specs, memory_limit)


def _pins(name: str, layout: Any, mesh: Mesh, node: fx.Node) -> Iterator[Pin]:
    """The pins of a node that the user calls ``name``: one, or of several results one for each that is not left free."""
    said = f"pins[{name!r}]"
    if is_tensor(node):
        yield _pin(layout, mesh, node.meta["val"], f"{name!r} ({node.name})", said)
        return
    results, given = outputs_of(node), _of_results(layout)
    if given is None or len(given) != len(results):
        what = f"{node.name} has {len(results)} results, {said} gives {1 if given is None else len(given)} layout(s)"
        example = ", ".join([repr("R" * mesh.ndim), *["None"] * (len(results) - 1)])
        raise LayoutError(what, where=said, remedy=f"give one for each, None where free: pins={{{name!r}: ({example})}}")
    for index, (value, wanted) in enumerate(zip(results, given, strict=True)):
        if wanted is not None and value is None:
            raise LayoutError(f"result {index} of {node.name} is no tensor", where=said, remedy=f"give None in place of {wanted!r}")
        if wanted is not None and value is not None:
            yield _pin(wanted, mesh, value, f"result {index} of {node.name}", f"{said}[{index}]", index)


def _of_results(layout: Any) -> list[Any] | None:
    """Layouts of several results: a sequence of them, or a text as ``print(plan)`` has it (``"RS(0), R"``, ``*`` where free)."""
    if isinstance(layout, str):
        parts = [part.strip() for part in layout.split(",")]
        return [None if part == "*" else part for part in parts] if len(parts) > 1 else None
    several = isinstance(layout, Sequence) and not any(isinstance(part, Placement) for part in layout)
    return list(layout) if several else None


def _pin(layout: Any, mesh: Mesh, value: torch.Tensor, what: str, said: str, output: int = 0) -> Pin:
    """The pin that the user wrote as ``said``; a LayoutError about it says so."""
    try:
        found = pattern(layout, mesh, value.dim(), what)
    except LayoutError as error:
        raise LayoutError(error.what, where=error.where or said, remedy=error.remedy) from error
    return Pin(found, f"{said}={_show(layout)}", output)


def pattern(layout: Any, mesh: Mesh, ndim: int, what: str) -> Pattern:
    """Reads ``"RS(0)"``, a sequence of placements (None: free), or ``{"tp": Shard(0)}`` (axes not named stay free)."""
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    if isinstance(layout, Mapping):
        named = {mesh.axis(axis): placement for axis, placement in layout.items()}
        for axis, placement in layout.items():
            if not isinstance(placement, Placement | None):
                remedy = f"write {{{axis!r}: Shard(0)}}, Replicate() or Partial(); None leaves the axis free"
                raise LayoutError(f"{placement!r} on axis {axis!r} of {what} is no placement", remedy=remedy)
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
        return "{" + ", ".join(f"{k}: {_show([v])}" for k, v in layout.items()) + "}"
    if isinstance(layout, str):
        return repr(layout)
    return "".join("*" if p is None else placement_str(p) for p in layout)


def _add(values: dict[str, tuple[Pin, ...]], name: str, pin: Pin) -> None:
    values[name] = (*values.get(name, ()), pin)


def _by_name(given: Any, names: list[str], mesh: Mesh, what: str) -> list[tuple[str, Any]]:
    """(name, layout) pairs from a mapping by name, a sequence in order (None: free), or one layout for all (a mapping by axis too)."""
    if given is None:
        return []
    if isinstance(given, str) or (isinstance(given, (Sequence, Mapping)) and given and _is_layout(given, names, mesh)):
        return [(name, given) for name in names]
    known = ", ".join(names) or "no tensors"
    if isinstance(given, Mapping):
        for name in given:
            if name not in names:
                said = f"{what} names {name!r}, which there is not{closest(name, names)}"
                raise ConstraintError(said, where=what, remedy=f"name one of {known}")
        return [(name, layout) for name, layout in given.items() if layout is not None]
    if not isinstance(given, Sequence):
        raise ConstraintError(
            f"{what} is a {type(given).__name__}",
            where=what,
            remedy="give one layout, a sequence of layouts, or a mapping of names to layouts",
        )
    if len(given) != len(names):
        raise ConstraintError(
            f"{what} has {len(given)} layouts for {len(names)} tensors", where=what, remedy=f"give one for each of {known}, None where free"
        )
    return [(name, layout) for name, layout in zip(names, given, strict=True) if layout is not None]


def _is_layout(given: Sequence[Any] | Mapping[Any, Any], names: list[str], mesh: Mesh) -> bool:
    """Whether a sequence or a mapping is one layout: all placements, or all keys axes (and not names of tensors)."""
    if not isinstance(given, Mapping):
        return all(isinstance(p, Placement) for p in given)
    by_axis = set(mesh.axis_names) - set(names)
    return all(isinstance(p, Placement) for p in given.values()) or all(key in by_axis for key in given)


def _matches(graph: PlanningGraph, name: str, layout: Any) -> list[fx.Node]:
    """Nodes that a pin means: by the user's name or glob of a parameter, buffer or input, else by node name or glob.

    Nodes with several results by their own name, and by globs with layouts of several.
    """
    known = {i.name: i.node for i in graph.inputs}
    known.update({alias: known[target] for alias, target in graph.aliases.items() if target in known})
    glob = _of_results(layout) is not None
    tensors = {n.name: n for n in graph.nodes if n.op != "output" and outputs_of(n) and (is_tensor(n) or glob or n.name == name)}
    found = [graph.by_name[node] for user, node in known.items() if user == name or fnmatch.fnmatchcase(user, name)]
    found = found or [n for node, n in tensors.items() if node == name or fnmatch.fnmatchcase(node, name)]
    if not found:
        what = f"pin {name!r} matches no parameter, buffer, input or node{closest(name, [*known, *tensors])}"
        parameters = (i.name for i in graph.inputs_of("parameter"))
        raise ConstraintError(what, where=f"pins[{name!r}]", remedy=f"name one of {_some([*parameters, *known, *tensors])}")
    return list(dict.fromkeys(found))


def _some(names: Iterable[str], most: int = 5) -> str:
    """The first few of ``names``, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {more} more" if more > 0 else "")


PLAN_PINS = "pins, which are a plan"


def _plan_pins(graph: PlanningGraph, mesh: Mesh, plan: ShardingPlan) -> dict[str, OpSpec]:
    """The OpSpecs of a (partial) plan; its nodes must be this graph's."""
    if plan.mesh.shape != mesh.shape or plan.mesh.axis_names != mesh.axis_names:
        raise ConstraintError(f"the plan is for mesh {plan.mesh}, not {mesh}", where=PLAN_PINS, remedy="plan for this mesh")
    if plan.graph_hash and plan.graph_hash != graph.hash:
        raise ConstraintError(
            f"the plan is for another graph (hash {plan.graph_hash[:12]}, this model has {graph.hash[:12]})",
            where=PLAN_PINS,
            remedy="plan again without it, or pin layouts by name",
        )
    specs = {}
    for node in plan.nodes:
        if node.name not in graph.by_name:
            what = f"the plan names node {node.name!r}, which this graph lacks{closest(node.name, graph.by_name)}"
            raise ConstraintError(what, where=PLAN_PINS, remedy=f"name one of {_some(n.name for n in planned_nodes(graph))}")
        target = graph.by_name[node.name]
        if is_getitem(target):
            remedy = f"name {target.args[0]} instead"
            raise ConstraintError(f"the plan names {node.name!r}, one output of an operator", where=PLAN_PINS, remedy=remedy)
        _check_spec(target, node.spec, mesh)
        specs[node.name] = node.spec
    return specs


def _follow_inputs(graph: PlanningGraph, specs: Mapping[str, OpSpec]) -> Iterator[tuple[str, Pin]]:
    """A gradient or mutated buffer that the plan returns in a layout asks its input for it."""
    if "output" in specs:
        nodes = {i.name: i.node for i in graph.inputs if i.kind in ("parameter", "buffer", "input")}
        for end, layout in zip(graph.outputs, specs["output"].inputs, strict=True):
            if end.kind != "output":
                yield nodes[end.name], Pin(layout, f"{end.kind} {end.name}: {layout} of the plan given as pins")


def _check_spec(node: fx.Node, spec: OpSpec, mesh: Mesh) -> None:
    reads, gives = operands(node), outputs_of(node) if node.op != "output" else ()
    if len(spec.inputs) not in (0, len(reads)) or (node.op == "output" and not spec.inputs) or len(spec.outputs) != len(gives):
        raise ConstraintError(
            f"the plan gives {node.name} the spec {spec}, but it has {len(reads)} operands and {len(gives)} outputs",
            where=source_line(node) or PLAN_PINS,
            remedy="give a layout for each; no inputs at all leave them free",
        )
    tensors = [(o.meta["val"], layout) for o, layout in zip(reads, spec.inputs, strict=bool(spec.inputs))]
    tensors += [(v, layout) for v, layout in zip(gives, spec.outputs, strict=True) if v is not None]
    for value, layout in tensors:
        try:
            pattern(layout, mesh, value.dim(), f"{node.name} in the plan")
        except LayoutError as error:
            raise LayoutError(error.what, where=source_line(node) or PLAN_PINS, remedy=error.remedy) from error
