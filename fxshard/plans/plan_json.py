"""A PlanData as JSON: one line per node and per redistribution, so that ``diff`` can compare two plans.

Reading is strict: anything that could not have been written is a FileError that says where it is. The first line holds the SHA-256 of the
rest; in a plan that is written or edited by hand it is left out. In one with ``"partial": true``, most fields may be left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import FxshardError, LayoutError, PlanError, closest
from fxshard.files import LARGEST, LARGEST_FIGURE, SEAL, Field, Readers, atomic_file, parse_json, read_bytes, write_json, write_sealed
from fxshard.graph.planning_graph import RELABELS, UNKNOWN
from fxshard.layout.layouts import FoldedShard, Layout, canonical, check_layout, placement_str, same_layout
from fxshard.layout.redistribution import Step, is_legal, sent_bytes, single_step, walk
from fxshard.memory_profile import KINDS
from fxshard.mesh.hardware import HARDWARE
from fxshard.mesh.hardware_file import ITEMSIZES, read_hardware, write_hardware
from fxshard.mesh.mesh import Mesh
from fxshard.plans.offload import KINDS as OFFLOADS
from fxshard.plans.offload import Offload
from fxshard.plans.plan_data import (
    NODE_COLLECTIVES,
    Certificate,
    NodeCollective,
    OpSpec,
    PlanData,
    PlanEnd,
    PlannedNode,
    Redistribution,
    again,
)
from fxshard.plans.plan_sizes import read_example_sizes, read_sizes, write_sizes
from fxshard.plans.plan_sources import SOURCES, check_collectives, write_sources
from fxshard.views.stored import BY_HAND, FORMAT, VERSION, check_plan

UNITS = ("microseconds", "bytes")
FIX = "correct this field, or make the plan again"
FOLDED = re.compile(r"S\(([0-9]{1,9}) in ([0-9]{1,9}(?:,[0-9]{1,9})*)\)")
OTHERS = "other axes cut the same dim, or pending values there would be reduced in another order"
ROUNDING = 1e-9
"""Two sums of the same costs count as equal up to this relative difference."""

Plan = TypeVar("Plan", bound=PlanData)


def save(plan: PlanData, path: str | Path) -> None:
    """Writes ``plan`` to ``path`` atomically; raises FileError if the path cannot be written."""
    text = dumps(plan)
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def dumps(plan: PlanData, sources: bool = True) -> str:
    """The plan as JSON text; equal plans give equal texts. Raises PlanError if a number in it is not finite.

    ``sources``: whether to include what is not part of the decision (plan_sources.py), and the hash of the text.
    """
    try:
        return write_sealed(plan_fields(plan)) if sources else write_json(plan_fields(plan, sources))
    except ValueError as error:
        remedy = "give finite costs; if the planner made it, please report it"
        raise PlanError("the plan holds a number that is not finite", remedy=remedy) from error


def plan_fields(plan: PlanData, sources: bool = True) -> dict[str, Any]:
    """The plan as plain data: the fields of its file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "partial": plan.partial,
        "mesh": write_mesh(plan.mesh),
        "train": plan.train,
        "graph_hash": plan.graph_hash,
        "certificate": _write_certificate(plan.certificate),
        "memory": {kind: int(plan.memory[kind]) for kind in sorted(plan.memory)},
        "memory_limit": None if plan.memory_limit is None else int(plan.memory_limit),
        **write_sizes(plan),
        "inputs": [_write_end(end) for end in plan.inputs],
        "outputs": [_write_end(end) for end in plan.outputs],
        "nodes": [write_node(node) for node in plan.nodes],
        "redistributions": [_write_redistribution(r, plan.mesh) for r in plan.redistributions],
        "fallbacks": [{"node": node, "reason": reason} for node, reason in plan.fallbacks],
        **({"recomputed": [{"block": name, "nodes": list(nodes)} for name, nodes in plan.recomputed.items()]} if plan.recomputed else {}),
        **({"offloaded": [vars(one) for one in plan.offloaded]} if plan.offloaded else {}),
        **(write_sources(plan) if sources else {}),
    }


def write_mesh(mesh: Mesh) -> dict[str, Any]:
    """Axes as pairs, in order; the hardware by name if it is a preset, else by its numbers."""
    axes = [[name, size] for name, size in zip(mesh.axis_names, mesh.shape, strict=True)]
    h = mesh.hardware
    return {"axes": axes, "hardware": h.name if HARDWARE.get(h.name) == h else write_hardware(h)}


def _write_certificate(c: Certificate) -> dict[str, Any]:
    return {"unit": c.unit, "objective": float(c.objective), "lower_bound": float(c.lower_bound), "cut": bool(c.cut)}


def _write_end(end: PlanEnd) -> dict[str, str]:
    return {"kind": end.kind, "name": end.name, "node": end.node}


def write_node(node: PlannedNode) -> dict[str, Any]:
    """A node as JSON fields."""
    return {
        "name": node.name,
        "op": node.op,
        "inputs": [str(layout) for layout in node.spec.inputs],
        "outputs": [str(layout) for layout in node.spec.outputs],
        "shapes": [[int(size) for size in shape] for shape in node.shapes],
        "dtypes": list(node.dtypes),
        "compute": float(node.compute),
        **({"collectives": [vars(c) | {"buffer": list(c.buffer)} for c in node.collectives]} if node.collectives else {}),
    }


def _write_redistribution(r: Redistribution, mesh: Mesh) -> dict[str, Any]:
    return {
        "value": r.value,
        "shape": [int(size) for size in r.shape],
        "itemsize": int(r.itemsize),
        "source": str(r.source),
        "target": str(r.target),
        "steps": [_write_step(step, mesh) for step in r.steps],
        "readers": [[node, int(index)] for node, index in r.readers],
        "cost": float(r.cost),
        **({"ahead": True} if r.ahead else {}),
        **({"hidden": float(r.hidden)} if r.hidden else {}),
    }


def _write_step(step: Step, mesh: Mesh) -> dict[str, str]:
    return {"kind": step.kind, "axis": mesh.axis_names[step.axis], "from": placement_str(step.source), "to": placement_str(step.target)}


def load(make: type[Plan], path: str | Path) -> Plan:
    """Reads a plan of class ``make``; raises FileError that names the file, the field, the fault and the remedy."""
    return loads(make, read_bytes(path), str(path))


def loads(make: type[Plan], text: str | bytes, where: str) -> Plan:
    """Reads a plan of class ``make`` from JSON text; ``where`` names it in errors. Layouts on axes of one rank become Replicate."""
    root = parse_json(text, where, BY_HAND)
    check_plan(root, text)
    partial, mesh = root.get("partial", Field.boolean, False), root.get("mesh", read_mesh)
    decided: Readers = {
        "train": Field.boolean,
        "graph_hash": Field.text,
        "nodes": lambda f: f.tuple_of(lambda one: _read_node(one, mesh, partial)),
        "redistributions": lambda f: f.tuple_of(lambda one: _read_redistribution(one, mesh)),
        "certificate": _read_certificate,
        "inputs": lambda f: f.tuple_of(_read_end),
        "outputs": lambda f: f.tuple_of(_read_end),
        "memory": _read_memory,
        "memory_limit": lambda f: f.optional(Field.whole),
        "fallbacks": lambda f: f.tuple_of(_read_fallback),
    }
    free: Readers = {
        **dict.fromkeys((SEAL, "format"), Field.text),
        "version": Field.whole,
        "partial": Field.boolean,
        "memory_sizes": read_sizes,
        "example_sizes": read_example_sizes,
        "recomputed": _read_recomputed,
        "offloaded": lambda f: f.tuple_of(_read_offload),
        "collectives": Field.items,
        **{name: read for name, (_, read) in SOURCES.items()},
    }
    said = root.record({"mesh": lambda _: mesh}, {**free, **decided}) if partial else root.record({"mesh": lambda _: mesh, **decided}, free)
    named = {SOURCES[name][0] if name in SOURCES else name: one for name, one in said.items() if name not in APART}
    plan = make(**{"train": True, "graph_hash": "", "nodes": (), **named})
    fields = root.entries()
    _check_names(plan, fields)
    _check_figures(plan, fields)
    if "collectives" in fields:
        check_collectives(plan, fields["collectives"])
    return plan.canonical()


APART = (SEAL, "format", "version", "collectives")
"""Fields of the file that a plan does not hold."""


def _read_memory(field: Field) -> dict[str, int]:
    memory = {kind: one.whole() for kind, one in field.entries().items()}
    for kind in memory:
        if kind not in KINDS:
            raise field.fail(f"unknown kind of memory {kind!r}{closest(kind, KINDS)}", f"kinds are {', '.join(KINDS)}")
    return memory


def read_mesh(field: Field) -> Mesh:
    """A mesh as ``write_mesh`` writes it."""
    field.known(("axes", "hardware"))
    pairs = [(name.text(), size.whole(1)) for name, size in (pair.items(2) for pair in field.get("axes", Field.items))]
    if len(dict(pairs)) != len(pairs):
        raise field.fail("two mesh axes have the same name", FIX)
    hardware = field.get("hardware", read_hardware, HARDWARE["cpu"])
    if math.prod(size for _, size in pairs) > LARGEST:
        raise field.fail("no mesh has so many ranks", FIX)
    try:
        return Mesh(dict(pairs), hardware)
    except FxshardError as error:
        raise field.fail(error.what, error.remedy) from error


def _read_certificate(field: Field) -> Certificate:
    bound: Readers = {"lower_bound": lambda f: f.figure(-LARGEST_FIGURE)}  # below 0 it is weak, not wrong
    c = Certificate(**field.record({"unit": Field.text, "objective": Field.figure, **bound, "cut": Field.boolean}))
    if c.unit not in UNITS:
        raise field.fail(f"unknown unit {c.unit!r}", f"units are {' and '.join(UNITS)}")
    if c.lower_bound > c.objective * (1 + ROUNDING):
        raise field.fail(f"the lower bound {c.lower_bound} is above the objective {c.objective}", FIX)
    return c


def _read_end(field: Field) -> PlanEnd:
    return PlanEnd(**field.record({"kind": Field.text, "name": Field.text, "node": Field.text}))


def _texts(field: Field) -> tuple[str, ...]:
    return field.tuple_of(Field.text)


def _read_fallback(field: Field) -> tuple[str, str]:
    node, reason = field.record({"node": Field.text, "reason": Field.text}).values()
    return node, reason


def _read_recomputed(field: Field) -> dict[str, tuple[str, ...]]:
    blocks = {}
    for one in field.items():
        name, nodes = one.record({"block": Field.text, "nodes": _texts}).values()
        if name in blocks:
            raise one.fail(f"the block {name!r} occurs twice", FIX)
        blocks[name] = nodes
    return blocks


def _read_offload(field: Field) -> Offload:
    readers: Readers = {"node": Field.text, "kind": Field.text, "held": Field.whole, "inward": Field.whole, "outward": Field.whole}
    found = Offload(**field.record({**readers, "cost": Field.figure}))
    if found.kind not in OFFLOADS:
        raise field.fail(f"unknown kind {found.kind!r}{closest(found.kind, OFFLOADS)}", f"kinds are {', '.join(OFFLOADS)}")
    return found


def _shape(field: Field) -> tuple[int, ...]:
    shape = field.tuple_of(lambda size: size.whole(UNKNOWN))
    if math.prod(abs(size) for size in shape) > LARGEST:
        raise field.fail("no tensor has so many elements", FIX)
    return shape


def _itemsize(field: Field) -> int:
    if field.whole() not in ITEMSIZES:
        raise field.fail(f"no element has a size of {str(field.value)[:40]} bytes", f"sizes are {', '.join(map(str, ITEMSIZES))}")
    return field.whole()


def read_layout(field: Field, mesh: Mesh, shape: tuple[int, ...] | None = None) -> Layout:
    """A layout in notation, with one placement per axis of ``mesh``, whose dims fit ``shape`` if it is known."""
    text = field.text()
    try:
        layout = Layout.parse(text)
        if any(not p.parts for p in layout.packed):
            raise field.fail(f"layout {text[:40]!r} does not say the sizes of its parts", "write them: S(0:8+4+4)")
        if shape is None and len(layout) == mesh.ndim:
            return layout
        layout = check_layout(layout, len(shape or ()), mesh.ndim, "this tensor")
        if shape is not None and any(sum(p.parts) != shape[p.dim] for p in layout.packed):
            raise field.fail(f"the parts of {text[:40]!r} do not add up to the dim, in a tensor of shape {list(shape)}", FIX)
        return layout
    except LayoutError as error:
        raise field.fail(error.what, error.remedy) from error
    except ValueError as error:
        raise field.fail(f"cannot read layout {text[:40]!r}", FIX) from error


def _read_operand(field: Field, mesh: Mesh) -> Layout:
    """A layout of an operand; its shape is unknown here, so dims must count from the front."""
    layout = read_layout(field, mesh)
    if any(isinstance(p, Shard) and p.dim < 0 for p in layout):
        raise field.fail(f"layout {layout} of an operand counts dims from the end", "count them from 0")
    return layout


def _read_node(field: Field, mesh: Mesh, partial: bool) -> PlannedNode:
    derived: Readers = {
        "op": Field.text,
        "inputs": lambda f: f.tuple_of(lambda one: _read_operand(one, mesh)),
        "shapes": lambda f: f.tuple_of(_shape),
        "dtypes": _texts,
        "compute": Field.figure,
    }
    needed: Readers = {"name": Field.text, "outputs": Field.items}
    own: Readers = {"collectives": lambda f: f.tuple_of(lambda one: _read_own_collective(one, mesh))}
    said = field.record(needed, {**derived, **own}) if partial else field.record({**needed, **derived}, own)
    said = {"op": "", "inputs": (), "shapes": (), "dtypes": (), **said}
    shapes, outputs = said["shapes"], said.pop("outputs")
    if len(shapes) != len(said["dtypes"]) or len(shapes) > len(outputs):
        raise field.fail(f"{len(outputs)} outputs, {len(shapes)} shapes and {len(said['dtypes'])} dtypes do not match", FIX)
    # Outputs that are not tensors have no shape; shapes can then not be matched with outputs.
    known = shapes if len(shapes) == len(outputs) else [None] * len(outputs)
    layouts = tuple(read_layout(one, mesh, shape) for one, shape in zip(outputs, known, strict=True))
    if any(one.operand >= len(said["inputs"]) for one in said.get("collectives", ())):
        raise field.fail("a collective sends an operand that the node does not have", FIX)
    return PlannedNode(spec=OpSpec(said.pop("inputs"), layouts), **said)


def _read_own_collective(field: Field, mesh: Mesh) -> NodeCollective:
    room: Readers = {"room": lambda f: f.whole(1, math.prod(mesh.shape))}  # what a rank sends is divided by it
    readers: Readers = {"kind": Field.text, "axis": Field.text, "buffer": _shape, "itemsize": _itemsize, "operand": Field.whole}
    found = NodeCollective(**field.record({**readers, **room}))
    if found.axis not in mesh.axis_names or found.kind not in NODE_COLLECTIVES:
        what = f"a node issues no {found.kind!r} on axis {found.axis!r}"
        raise field.fail(what, f"kinds are {', '.join(NODE_COLLECTIVES)}, axes {', '.join(mesh.axis_names)}")
    return found


def _read_redistribution(field: Field, mesh: Mesh) -> Redistribution:
    shape = field.get("shape", _shape)
    source, target = (field.get(end, lambda f: read_layout(f, mesh, shape)) for end in ("source", "target"))
    needed: Readers = {
        "value": Field.text,
        "shape": lambda _: shape,
        "itemsize": _itemsize,
        "source": lambda _: source,
        "target": lambda _: target,
        "steps": lambda f: _read_steps(f, source, target, shape, mesh),
        "readers": lambda f: f.tuple_of(_read_reader),
        "cost": Field.figure,
    }
    return Redistribution(**field.record(needed, {"ahead": Field.boolean, "hidden": Field.figure}))


def _read_reader(field: Field) -> tuple[str, int]:
    node, index = field.items(2)
    return node.text(), index.whole()


def _read_steps(field: Field, source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Step, ...]:
    """Steps that each start where the previous one ended, and lead from ``source`` to ``target``.

    Axes of one rank have no part in it: no layout there is in the way of a step, and a step there, in a file of an earlier version, leads
    nowhere.
    """
    layout, steps = canonical(source, mesh.shape), []
    for one in field.items():
        step = _read_step(one, shape, mesh)
        steps.append(step)
        if mesh.shape[step.axis] == 1:
            continue
        if layout[step.axis] != step.source:
            found, axis = placement_str(layout[step.axis]), mesh.axis_names[step.axis]
            raise one.fail(f"the step starts at {placement_str(step.source)}, but the value has {found} on axis {axis} there", FIX)
        if not is_legal(step, layout):
            raise one.fail(f"{placement_str(step.source)} to {placement_str(step.target)} is not a legal step from {layout}: {OTHERS}", FIX)
        layout = step.after(layout)
    if not same_layout(layout, target, mesh.shape):
        raise field.fail(f"the steps lead from {source} to {layout}, not to the target {target}", FIX)
    return tuple(steps)


def _read_step(field: Field, shape: tuple[int, ...], mesh: Mesh) -> Step:
    field.known(("kind", "axis", "from", "to"))
    name, kind = field.get("axis", Field.text), field.get("kind", Field.text)
    if name not in mesh.axis_names:
        raise field.fail(f"the mesh has no axis {name!r}", f"its axes are {', '.join(mesh.axis_names)}")
    source, target = (field.get(end, lambda f: _read_placement(f, shape)) for end in ("from", "to"))
    step = None if source == target else single_step(mesh.axis_names.index(name), source, target)
    if step is None:
        raise field.fail(f"there is no step from {placement_str(source)} to {placement_str(target)}", FIX)
    if step.kind != kind:
        raise field.fail(f"{placement_str(source)} to {placement_str(target)} is {step.kind}, not {kind!r}", FIX)
    return step


def _read_placement(field: Field, shape: tuple[int, ...]) -> Placement:
    folded = FOLDED.fullmatch(field.text())
    if folded is None:
        return read_layout(field, Mesh({"one": 1}), shape)[0]
    if int(folded[1]) >= len(shape):
        raise field.fail(f"{field.text()} is for a tensor of more than {len(shape)} dims", FIX)
    return FoldedShard(int(folded[1]), tuple(map(int, folded[2].split(","))))


def _check_names(plan: PlanData, fields: Mapping[str, Field]) -> None:
    """Raises FileError unless node names are unique, and readers, recomputed nodes and inputs are nodes of the plan."""
    operands: dict[str, int] = {}
    for number, node in enumerate(plan.nodes):
        if node.name in operands:
            raise fields["nodes"].items()[number].fail(f"the node {node.name!r} occurs twice", FIX)
        operands[node.name] = len(node.spec.inputs)
    for number, entry in enumerate(plan.redistributions):
        for reader, index in () if plan.partial else entry.readers:
            if index >= operands.get(reader, 0):
                what = f"reader {reader!r} is not a node of the plan" if reader not in operands else f"{reader!r} has no operand {index}"
                raise fields["redistributions"].items()[number].fail(what, FIX)
    for number, (block, nodes) in enumerate(plan.recomputed.items()):
        for name in () if plan.partial else nodes:
            if name not in operands or again(name) not in operands:
                what = f"{name!r} of the block {block!r} is recomputed, but {name!r} and {again(name)!r} are not both nodes of the plan"
                raise fields["recomputed"].items()[number].fail(what, FIX)
    parameters = {node for node, kind in plan.kinds.items() if kind == "parameter"}
    for number, one in enumerate(plan.offloaded):
        if one.node not in parameters or one.node in {other.node for other in plan.offloaded[:number]}:
            what = f"{one.node!r} is no parameter of the plan, or is named twice"
            raise fields["offloaded"].items()[number].fail(what, FIX)
    for number, end in enumerate(plan.inputs):
        if end.node not in operands and not plan.partial:
            raise fields["inputs"].items()[number].fail(f"input node {end.node!r} is not a node of the plan", FIX)
        if end.node in plan.specs and not plan.specs[end.node].outputs:
            raise fields["inputs"].items()[number].fail(f"input node {end.node!r} has no layout", FIX)


def _may_hide(plan: PlanData, entry: Redistribution) -> bool:
    """Whether the value may be a (reshaped or cast) parameter or its gradient, whose time may be hidden; the graph would tell exactly."""
    node = plan.picked.get(entry.value, (entry.value, 0))[0]
    if node in plan.kinds:
        return plan.kinds[node] == "parameter"
    ops = {n.name: n.op for n in plan.nodes}
    gradients = {k for k, end in enumerate(plan.outputs) if end.kind == "gradient"}
    ends = (index in gradients if ops.get(name) == "output" else ops.get(name) in RELABELS for name, index in entry.readers)
    return ops.get(node) in RELABELS or (bool(entry.readers) and all(ends))


def _check_figures(plan: PlanData, fields: Mapping[str, Field]) -> None:
    """Raises FileError unless the objective is the sum of costs, hidden times are possible, and a redistribution's cost in bytes, if not
    a mean over ``example_sizes``, is what its steps send."""
    if plan.partial:
        return
    for number, entry in enumerate(plan.redistributions if plan.certificate.unit == "bytes" and not plan.example_sizes else ()):
        path = walk(entry.source, entry.steps)
        sent = sum(sent_bytes(step, layout, entry.shape, entry.itemsize, plan.mesh) for layout, step, _ in path)
        if entry.cost != sent:
            raise fields["redistributions"].items()[number].fail(f"the cost is {entry.cost}, but the steps send {sent} bytes", FIX)
    share = plan.mesh.hardware.overlap if plan.certificate.unit == "microseconds" else 0.0
    for number, entry in enumerate(plan.redistributions):
        most = share * (entry.cost + entry.hidden) * (1 + ROUNDING)
        if entry.hidden > most:
            raise fields["redistributions"].items()[number].fail(f"{entry.hidden} us are hidden, but at most {most} can be", FIX)
        if entry.hidden and not _may_hide(plan, entry):
            what = f"{entry.hidden} us are hidden, but {entry.value!r} is neither a parameter that is gathered nor a gradient"
            raise fields["redistributions"].items()[number].fail(what, FIX)
    total = sum(node.compute for node in plan.nodes) + sum(r.cost for r in plan.redistributions) + sum(one.cost for one in plan.offloaded)
    beside = " with copies to the host" if plan.offloaded else ""
    if not math.isclose(plan.objective, total, rel_tol=ROUNDING):
        what = f"the objective is {plan.objective}, but nodes and redistributions cost {total} together{beside}"
        raise fields["certificate"].fail(what, FIX)
